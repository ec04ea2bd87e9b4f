"""One script a question; results are JSON, tables and pictures are drawn from it."""
