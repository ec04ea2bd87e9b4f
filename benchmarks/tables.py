"""Each result as a table in Markdown, or as lines."""

import statistics

from . import measure

PIECES = ("place", "dispatch", "wait", "fetch")


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def milliseconds(samples: list[float]) -> str:
    found = measure.summary(samples)
    return f"{1e3 * found['median']:.4g} ({1e3 * found['spread']:.2g})"


def step_table(result: dict) -> str:
    """A row for each contender: medians as multiples of pmap's in the same run."""
    rows = []
    for name, samples in result["samples"].items():
        whole = measure.summary([step["whole"] for step in samples["latency"]])
        pmap = measure.summary([step["whole"] for step in result["samples"]["pmap"]["latency"]])
        pieces = [f"{statistics.median(step[piece] for step in samples['latency']) / pmap['median']:.3f}" for piece in PIECES]
        compiling = result["compiling"].get(name)
        base = result["compiling"]["pmap"]
        compiled = "" if compiling is None else " ".join(f"{compiling[part] / base[part]:.2f}" for part in ("lowering", "compiling", "first run"))
        rows.append([
            name, f"{1e3 * whole['median']:.4g}", f"{whole['median'] / pmap['median']:.2f}", f"{whole['90 %'] / pmap['median']:.2f}",
            f"{whole['spread'] / pmap['median']:.2f}", f"{result['ratios']['rate'][name]:.2f}", *pieces, compiled,
        ])  # fmt: skip
    return table(["program", "ms", "latency", "90 %", "spread", "rate: time a step", *PIECES, "lowering, compiling, first run"], rows)


def input_table(result: dict) -> str:
    rows = [[name, f"{ratio:.2f}"] for name, ratio in result["ratios"].items()]
    return table(["input: ours as a multiple of the original's", "ratio"], rows)


def scaling_table(result: dict) -> str:
    """A row for each mode and number of devices; milliseconds are medians, with the spread."""
    rows = []
    for row in result["rows"]:
        start = [row["mode"], str(row["devices"]), str(row["batch_size"])]
        if "not run" in row:
            rows.append([*start, f"not run: {row['not run']}", *[""] * 6])
            continue
        both = ("pmap", "shard_map")
        collectives, alone = row["collectives"]["shard_map"], row["collectives alone"]
        rows.append([
            *start, *(milliseconds(row["samples"][name]) for name in both), f"{row['ratio']:.2f}",
            *("; ".join(f"{row[what][name]:.2f}" for name in both) if what in row else "" for what in ("efficiency", "cost on shared cores")),
            f"{collectives['arrays']}, {collectives['bytes'] / 1e6:.4g} MB", f"{milliseconds(alone) if alone else 'none'}; {1e3 * row['predicted']:.3g}",
        ])  # fmt: skip
    columns = ["mode", "devices", "batch", "pmap, ms", "shard_map, ms", "shard_map / pmap", "efficiency: pmap; shard_map"]
    columns += ["cost on shared cores", "collectives", f"their ms: alone; predicted at {result['settings']['link_gbytes']:g} GB/s"]
    return table(columns, rows)


def components_table(result: dict) -> str:
    """A row for each part: milliseconds, FLOP/s of all devices, share of the measured peak in the compute dtype."""
    peak = result["peaks"][result["settings"]["compute_dtype"]]["flops"]
    rows = []
    for name, samples in result["samples"].items():
        flops, seconds = result["flops"][name], statistics.median(samples)
        rate = [f"{flops / seconds / 1e9:.4g}", f"{flops / seconds / peak:.1%}"] if flops else ["", ""]
        total = result["sums"].get(name)
        rows.append(
            [name, milliseconds(samples), f"{flops / 1e9:.4g}" if flops else "", *rate, f"{total['parts'] / total['whole']:.2f}" if total else ""]
        )
    return table(["part", "ms (spread)", "GFLOP", "GFLOP/s", "of the measured peak", "sum of its parts / whole"], rows)


def utilisation_lines(result: dict) -> list[str]:
    lines = [
        f"measured peak in {dtype}: {peak['flops'] / 1e12:.4g} TFLOP/s, products of {peak['size']} x {peak['size']}"
        for dtype, peak in result["peaks"].items()
    ]
    for work, found in result["utilisation"].items():
        lines.append(f"utilisation, {work}: " + ", ".join(f"{share:.2%} of the {name} peak" for name, share in found.items()))
    return lines


def split_table(result: dict) -> str:
    """A row for each program and optimizer: milliseconds, multiples of pmap's, bytes of state on a device, and what the compiled step needs."""
    rows = []
    for name, samples in result["samples"].items():
        pmap = result["samples"]["pmap, " + name.partition(", ")[2]]
        held, needed = result["bytes_held"].get(name), result["bytes_needed"][name]
        ratio = f"{statistics.median(samples) / statistics.median(pmap):.2f}"
        rows.append([name, milliseconds(samples), ratio, f"{held / 1e6:.4g}" if held else "", *(f"{needed[kind] / 1e6:.4g}" for kind in ("all", "temporaries"))])
    return table(["step", "ms (spread)", "of pmap's", "MB of state on a device", "MB the step needs there", "temporaries of them"], rows)


def split_lines(result: dict) -> list[str]:
    """What Muon adds, how its step grows with the devices, and a chip's work at full size on paper."""
    ratios, grown, paper = result["ratios"], result["growth"]["samples"], result["on_paper"]
    lines = [f"what full Muon adds to AdamW's step, {side}: {ratios[f'added by Muon, {side}']:.2f} of what it adds to pmap's" for side in ("replicated", "split")]
    counts = ", ".join(f"{count}: {milliseconds(samples)}" for count, samples in grown.items())
    lines.append(f"the split Muon step by devices, same global batch, ms: {counts}; the last is {result['growth']['largest to one device']:.2f} times the first")
    for name, chip in paper["chip"].items():
        lines.append(
            f"on paper, {paper['devices']} chips, {paper['settings']['model_kind']}, batch {paper['settings']['batch_size']}, {name}: a chip and step "
            f"{chip['model'] / 1e12:.3g} TFLOP for the model, {chip['muon'] / 1e12:.3g} for Muon; {chip['sent'] / 1e9:.3g} GB sent; {chip['state'] / 1e9:.3g} GB of state"
        )
    return lines


def masters_table(result: dict) -> str:
    rows = [
        [name, f"{loss:.4f}", ", ".join(f"{one['loss']:.4f}" for one in result["samples"][name]), f"{result['unmoved'][name]:.1%}"]
        for name, loss in result["losses"].items()
    ]
    return table(["parameters", "validation loss", "of each seed", "left as they were by a step"], rows)


def quality_lines(result: dict) -> list[str]:
    """The verdict on samples and on seconds, each in one line."""
    lines, settings = [], result["settings"]
    for quantity, found in result["verdicts"].items():
        shown = "no interval" if found["interval"] is None else "95 % interval [{:+.2%}, {:+.2%}]".format(*found["interval"])
        lines.append(
            f"{quantity} to a validation loss of {settings['target']:g}: {found['verdict']} ({found['reason']}): {shown}, margin {found['margin']:+.0%}, "
            f"{settings['seeds']} paired seeds"
        )
    return lines


def sweep_table(result: dict) -> str:
    """Sorted by rows a second; then the settings that do not fit, each with the reason."""
    rows = []
    for row in result["rows"]:
        options = row["options"]
        muon = ", ".join(f"{name.removeprefix('muon_')} {value}" for name, value in options.items() if name.startswith("muon_"))
        start = [options["model_kind"], str(options["batch_size"]), options["optimizer"] + (f" ({muon})" if muon else "")]
        if "samples" not in row:
            reason = f"does not fit: {row['does not fit']}" if "does not fit" in row else f"failed: {row['failed']}"
            rows.append([*start, reason.replace("|", "/"), "", "", "", ""])
            continue
        rates = [f"{row['rows a second'][name]:.4g}" for name in ("shard_map", "pmap")]
        seconds = statistics.median(row["samples"]["shard_map"])
        rows.append([*start, *rates, f"{row['ratio']:.2f}", f"{row['flops'] / seconds / 1e9:.4g}", f"{row['bytes']['shard_map'] / 2**30:.3g}"])
    return table(["model", "batch", "optimizer", "rows/s, shard_map", "rows/s, pmap", "time / pmap's", "model GFLOP/s", "GiB"], rows)
