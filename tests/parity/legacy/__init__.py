"""Tests of the old side against its specification and the recordings."""
