"""checkpoint_jax.pkl: bits in and out, nothing executed, every misfit named, no half-written file."""

import collections
import functools
import io
import os
import pickle
import pickletools
import subprocess

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgo_shard import checkpoint
from kgo_shard.checkpoint import CheckpointError, load_checkpoint, read_pickle, save_checkpoint
from kgo_shard.config import Config
from kgo_shard.state import TrainState, init_state, to_host

OPTIONS = dict(pos_len=9, batch_size=16, model_kind="b2c32", compute_dtype="float32", ema_decay=0.9)
CONFIG = Config(**OPTIONS)


def drawn(state, seed=0):
    """A state of the same kind whose every leaf is random: nothing is zero or equal by chance."""
    rand = np.random.default_rng(seed)
    learned = jax.tree.map(lambda leaf: jax.device_put(rand.standard_normal(leaf.shape).astype(leaf.dtype), leaf.sharding), state.learned)
    return TrainState(learned, step=7, samples=112)


@pytest.fixture(scope="module")
def state():
    return drawn(init_state(CONFIG))


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / checkpoint.FILE_NAME
    save_checkpoint(path, state, CONFIG)
    return path


@pytest.fixture
def content(saved):
    with open(saved, "rb") as file:
        return pickle.load(file)


@pytest.fixture
def write(tmp_path):
    def write(content, protocol=None):
        path = tmp_path / checkpoint.FILE_NAME
        path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol))
        return path

    return write


def refusal(path, config=CONFIG) -> str:
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, config)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


def assert_same_bits(old, new):
    assert old.keys() == new.keys() and old
    for name in old:
        a, b = np.asarray(old[name]), np.asarray(new[name])
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name


# Round trip


def test_what_is_loaded_is_what_was_saved_bit_for_bit(state, saved):
    assert_same_bits(to_host(state), to_host(load_checkpoint(saved, CONFIG)))
    assert_same_bits(to_host(state), to_host(load_checkpoint(saved.parent, CONFIG)))  # the folder that holds it


def test_saving_what_was_loaded_gives_the_same_file(saved, tmp_path):
    save_checkpoint(tmp_path / "again.pkl", load_checkpoint(saved, CONFIG), CONFIG)
    assert (tmp_path / "again.pkl").read_bytes() == saved.read_bytes()


def test_bfloat16_leaves_survive(tmp_path):
    config = CONFIG.replace(param_dtype="bfloat16", opt_state_dtype="bfloat16")
    state = drawn(init_state(config), 1)
    save_checkpoint(tmp_path / "low.pkl", state, config)
    loaded = to_host(load_checkpoint(tmp_path / "low.pkl", config))
    assert loaded["params/conv_spatial/w"].dtype == ml_dtypes.bfloat16 and loaded["ema_params/conv_spatial/w"].dtype == np.float32
    assert_same_bits(to_host(state), loaded)


def test_a_file_of_one_device_loads_on_four(state, saved):
    loaded = load_checkpoint(saved, CONFIG.replace(data_parallel=True, data_parallel_devices=4))
    assert_same_bits(to_host(state), to_host(loaded))
    assert {len(leaf.addressable_shards) for leaf in jax.tree.leaves(loaded.learned)} == {4}


def test_a_loaded_state_is_placed_like_a_fresh_one(saved):
    fresh, loaded = init_state(CONFIG), load_checkpoint(saved, CONFIG)
    assert jax.tree.structure(fresh.learned) == jax.tree.structure(loaded.learned)
    for old, new in zip(jax.tree.leaves(fresh.learned), jax.tree.leaves(loaded.learned), strict=True):
        assert (old.shape, old.dtype, old.sharding, old.weak_type) == (new.shape, new.dtype, new.sharding, new.weak_type)
    assert type(loaded.step) is int and type(loaded.samples) is int


def test_the_file_is_the_originals(content):
    assert set(content) == {"params", "opt_state", "meta", "ema_params"} and set(content["opt_state"]) == {"m", "v"}
    assert type(content["params"]["blocks"]) is list and type(content["params"]["blocks"][1]["q_proj"]["w"]) is np.ndarray
    meta = content["meta"]
    assert set(meta) == set(
        "step samples model_config pos_len optimizer muon_lr_multiplier muon_momentum muon_row_split_size muon_target muon_polar_steps"
        " muon_group_blocks muon_split_jit loss_profile score_mode log_step_time moving_sum moving_weight ema_decay ema_dtype data_parallel"
        " data_parallel_devices per_device_batch fuse_projections attention_impl activation_dtype param_dtype opt_state_dtype opt_update_dtype"
        " rope_dtype ffn_mul_dtype attention_logits_dtype int8_train int8_target int8_fwd_bits int8_bwd_bits donate_train_buffers stack_blocks"
        " scan_blocks remat_blocks".split()
    )
    assert meta["model_config"] == {"version": 15, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "ffn_dim": 64, "num_scorebeliefs": 8}
    assert (meta["step"], meta["samples"], meta["pos_len"], meta["data_parallel_devices"], meta["per_device_batch"]) == (7, 112, 9, 0, 16)  # no data_parallel: 0, as the original writes
    assert {type(meta[name]) for name in ("moving_sum", "moving_weight")} == {float}
    assert {type(meta[name]) for name in ("step", "samples")} == {int}


def test_devices_are_counted_in_the_file(state, tmp_path):
    config = CONFIG.replace(data_parallel=True, data_parallel_devices=4)
    save_checkpoint(tmp_path / "four.pkl", state, config)
    meta = read_pickle(tmp_path / "four.pkl")["meta"]
    assert (meta["data_parallel"], meta["data_parallel_devices"], meta["per_device_batch"]) == (True, 4, 4)


def test_an_average_that_is_asked_for_but_absent_starts_from_the_parameters(content, write):
    del content["ema_params"]
    loaded = load_checkpoint(write(content), CONFIG)
    flat = to_host(loaded)
    for name in [name for name in flat if name.startswith("params/")]:
        assert flat[name].tobytes() == flat[name.replace("params/", "ema_params/", 1)].tobytes()
    leaves = jax.tree.leaves(loaded.learned)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    assert len(set(buffers)) == len(leaves), "the average would be given away with the parameters"


def test_an_average_that_is_not_asked_for_is_left_out(saved):
    assert load_checkpoint(saved, CONFIG.replace(ema_decay=0.0)).learned.ema is None


# NumPy's two spellings, and old protocols


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_every_pickle_protocol_is_read(state, content, write, protocol):
    assert_same_bits(to_host(state), to_host(load_checkpoint(write(content, protocol), CONFIG)))


def respell(data: bytes, spelling: str) -> bytes:
    """The same pickle with `numpy._core` or `numpy.core`, whichever is wanted, in every global that it asks for."""
    other = {"numpy.core": "numpy._core", "numpy._core": "numpy.core"}[spelling]
    out = bytearray()
    positions = [position for _, _, position in pickletools.genops(data)] + [len(data)]
    for (opcode, argument, start), end in zip(pickletools.genops(data), positions[1:], strict=True):
        piece = data[start:end]
        if opcode.name == "GLOBAL" and argument.startswith(other + "."):
            piece = piece.replace(other.encode(), spelling.encode())
        elif opcode.name == "SHORT_BINUNICODE" and argument.startswith(other + "."):
            text = argument.replace(other, spelling).encode()
            piece = b"\x8c" + bytes([len(text)]) + text
        elif opcode.name == "FRAME":
            piece = b""  # frames are optional, and their lengths have changed
        out += piece
    return bytes(out)


@pytest.mark.parametrize("spelling", ["numpy.core", "numpy._core"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_both_spellings_of_numpys_modules_are_read_without_a_warning(state, content, write, spelling, protocol):
    content["meta"]["moving_sum"] = np.float32(content["meta"]["moving_sum"])  # also a NumPy scalar
    data = respell(pickle.dumps(content, protocol), spelling)
    found = {argument for opcode, argument, _ in pickletools.genops(data) if isinstance(argument, str) and argument.startswith("numpy.")}
    assert found and all(argument.startswith(spelling + ".") for argument in found)
    assert_same_bits(to_host(state), to_host(load_checkpoint(write(data), CONFIG)))


# What is never executed


class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


EVIL = {
    "posix.system": lambda marker: Calls(os.system, f"touch {marker}"),
    "posix.mkdir": lambda marker: Calls(os.mkdir, marker),
    "builtins.eval": lambda marker: Calls(eval, f"__import__('os').mkdir({marker!r})"),
    "builtins.exec": lambda marker: Calls(exec, f"import os; os.mkdir({marker!r})"),
    "builtins.getattr": lambda marker: Calls(getattr, np.ndarray, "tofile"),
    "builtins.__import__": lambda marker: Calls(__import__, "os"),
    "open": lambda marker: Calls(io.open, marker, "w"),
    "subprocess.check_output": lambda marker: Calls(subprocess.check_output, ["mkdir", marker]),
    "functools.partial": lambda marker: Calls(functools.partial, os.mkdir, marker),
    "numpy.load": lambda marker: Calls(np.load, marker),
    "numpy.f2py": lambda marker: f"cnumpy.f2py.crackfortran\nmyeval\n(V__import__('os').mkdir({marker!r})\ntR.".encode(),
    "numpy.testing": lambda marker: f"cnumpy.testing._private.utils\nrunstring\n(V__import__('os').mkdir({marker!r})\n}}tR.".encode(),
    "numpy.ndarray.tofile": lambda marker: b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
    "_pickle.loads": lambda marker: Calls(pickle.loads, pickle.dumps(Calls(os.mkdir, marker))),
    "collections.namedtuple": lambda marker: Calls(collections.namedtuple, "T", "a"),
    "jax": lambda marker: b"cjax._src.core\nShapedArray\n.",
    "kgo_shard": lambda marker: b"ckgo_shard.config\nConfig\n.",
}


@pytest.mark.parametrize("name", EVIL)
def test_whatever_a_pickle_asks_for_is_refused_by_name_and_not_run(content, write, tmp_path, name):
    marker = str(tmp_path / "marker")
    evil = EVIL[name](marker)
    if not isinstance(evil, bytes):  # hidden in a good file
        content["meta"]["note"] = evil
        evil = pickle.dumps(content)
    message = refusal(write(evil))
    assert "it asks for " in message and name in message and "not loaded" in message
    assert not os.path.exists(marker)


def test_the_evil_files_are_evil(tmp_path):
    marker = str(tmp_path / "marker")
    for name in ("posix.system", "posix.mkdir", "builtins.eval", "builtins.exec", "subprocess.check_output", "_pickle.loads"):
        pickle.loads(pickle.dumps(EVIL[name](marker)))
        assert os.path.exists(marker), name
        (os.remove if os.path.isfile(marker) else os.rmdir)(marker)


def test_what_may_be_built_is_a_short_list_of_arrays_and_containers():
    allowed = {f"{module}.{name}" for module, name in checkpoint.ALLOWED}
    assert allowed == {
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "numpy.core.numeric._frombuffer",
        "numpy._core.numeric._frombuffer",
        "ml_dtypes.bfloat16",
        "ml_dtypes._ml_dtypes_ext.bfloat16",
        "collections.OrderedDict",
        "_codecs.encode",
    }


def test_an_object_array_inside_is_refused_by_what_it_holds(content, write, tmp_path):
    marker = str(tmp_path / "marker")
    content["params"]["conv_spatial"]["w"] = np.array([Calls(os.mkdir, marker)], dtype=object)
    assert "posix.mkdir" in refusal(write(content))
    assert not os.path.exists(marker)


# Damage


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999999])
def test_a_truncated_file_is_refused(saved, write, part):
    whole = saved.read_bytes()
    assert "truncated or damaged" in refusal(write(whole[: int(part * len(whole))]))


def test_a_file_without_its_last_byte_is_refused(saved, write):
    assert "truncated or damaged" in refusal(write(saved.read_bytes()[:-1]))


@settings(max_examples=600, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_a_damaged_file_loads_or_raises_checkpoint_error_and_nothing_else(data, saved, tmp_path_factory):
    damaged = bytearray(saved.read_bytes())
    # Arrays are most of the file; what decides is between them.
    places = st.one_of(st.integers(0, 600), st.integers(len(damaged) - 2000, len(damaged) - 1), st.integers(0, len(damaged) - 1))
    for place in data.draw(st.lists(places, max_size=3)):
        damaged[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    path = tmp_path_factory.getbasetemp() / "damaged.pkl"
    path.write_bytes(damaged[:cut])
    try:
        state = load_checkpoint(path, CONFIG)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert type(state) is TrainState


@pytest.mark.parametrize("content", [[1, 2], 3, None, {}, {"params": {}, "opt_state": {}}, {"params": [], "opt_state": {}, "meta": {}}])
def test_a_pickle_of_something_else_is_refused(write, content):
    refusal(write(content))


def test_a_missing_file_is_named(tmp_path):
    assert "no such file" in refusal(tmp_path / "nothing.pkl")


# Misfits


@pytest.mark.parametrize(
    ("key", "saved_value", "options"),
    [
        ("model_config", "'hidden_size': 32", {"model_kind": "b3c96"}),
        ("pos_len", "9", {"pos_len": 19}),
    ],
)
def test_another_model_or_board_is_refused_with_both_values(saved, key, saved_value, options):
    message = refusal(saved, CONFIG.replace(**options))
    wanted = {"model_config": "'hidden_size': 96", "pos_len": "19"}[key]
    assert key in message and saved_value in message and wanted in message and "--traindir" in message


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("optimizer", "muon", "adamw"),
        ("muon_target", "ffn", "all"),
        ("stack_blocks", True, "False"),
        ("fuse_projections", True, "False"),
        ("int8_train", True, "False"),
        ("int8_target", "all", "ffn"),
        ("int8_fwd_bits", 4, "8"),
        ("int8_bwd_bits", 4, "8"),
        ("pos_len", 19, "9"),
    ],
)
def test_another_optimizer_or_layout_is_refused_with_both_values(content, write, key, value, wanted):
    content["meta"][key] = value
    message = refusal(write(content))
    assert f"{key} {value}" in message and wanted in message


def test_what_early_files_did_not_say_is_assumed(state, content, write):
    for key in ("muon_target", "stack_blocks", "fuse_projections", "int8_train", "int8_target", "int8_fwd_bits", "int8_bwd_bits"):
        del content["meta"][key]
    assert_same_bits(to_host(state), to_host(load_checkpoint(write(content), CONFIG)))
    del content["meta"]["pos_len"]
    assert "pos_len None" in refusal(write(content))


TREES = ["params", "opt_state/m", "opt_state/v", "ema_params"]


def tree_of(content, tree):
    for word in tree.split("/"):
        content = content[word]
    return content


@pytest.mark.parametrize("tree", TREES)
def test_a_replica_axis_is_refused_naming_the_leaf(content, write, tree):
    # Replica-stacked leaves, as pmap holds them: every leaf once a device.
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 4), tree_of(content, tree))
    tree_of(content, tree).clear()
    tree_of(content, tree).update(stacked)
    message = refusal(write(content))
    assert f"{tree}: leaf " in message and "has shape (4, " in message and "expected (" in message


@pytest.mark.parametrize("tree", TREES)
def test_missing_extra_and_foreign_leaves_are_named(content, write, tree):
    blocks = tree_of(content, tree)["blocks"]
    leaf = blocks[1].pop("k_proj")
    assert f"{tree}: leaf blocks/1/k_proj/w is missing" in refusal(write(content))
    blocks[1]["k_proj"] = leaf | {"b": np.zeros(32)}
    assert f"{tree}: leaf blocks/1/k_proj/b is not part of this model" in refusal(write(content))
    for foreign in (np.full((32, 32), "x"), np.full((32, 32), None), np.zeros((32, 32), "V4"), np.zeros((32, 32), np.int32)):
        blocks[1]["k_proj"] = {"w": foreign}
        assert f"{tree}: leaf blocks/1/k_proj/w has dtype {foreign.dtype}" in refusal(write(content))
    for foreign in (3.0, "weights"):
        blocks[1]["k_proj"] = {"w": foreign}
        assert f"{tree} holds something that is not an array" in refusal(write(content)), foreign


@pytest.mark.parametrize("key", ["params", "opt_state", "meta", "m", "v"])
def test_a_missing_part_is_named(content, write, key):
    del (content["opt_state"] if key in "mv" else content)[key]
    assert key in refusal(write(content))


@pytest.mark.parametrize("key", ["step", "samples", "moving_sum", "moving_weight"])
@pytest.mark.parametrize("value", [None, "many", [1, 2], np.zeros(3)])
def test_counts_and_statistics_must_be_numbers(content, write, key, value):
    content["meta"][key] = value
    assert "must be numbers" in refusal(write(content))
    del content["meta"][key]
    assert key in refusal(write(content))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_counts_and_statistics_must_be_usable_numbers(content, write, value):
    for key in ("step", "moving_sum"):
        changed = content | {"meta": content["meta"] | {key: value}}
        if key == "step" and value == 1e300:
            continue  # an integer, if a large one
        assert "must be numbers" in refusal(write(changed)), key


@pytest.mark.parametrize("key", ["step", "samples"])
def test_negative_counts_are_refused(content, write, key):
    assert "not negative" in refusal(write(content | {"meta": content["meta"] | {key: -5}}))


# Saving


def test_a_failed_save_leaves_the_old_file(state, saved, tmp_path, monkeypatch):
    path = tmp_path / checkpoint.FILE_NAME
    path.write_bytes(saved.read_bytes())

    def half(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.pickle, "dump", half)
    with pytest.raises(CheckpointError, match="cannot be saved .No space left on device.; the checkpoint before it is whole"):
        save_checkpoint(path, drawn(state, 5), CONFIG)
    assert path.read_bytes() == saved.read_bytes() and os.listdir(tmp_path) == [checkpoint.FILE_NAME]
    monkeypatch.undo()
    save_checkpoint(path, drawn(state, 5), CONFIG)
    assert path.read_bytes() != saved.read_bytes() and os.listdir(tmp_path) == [checkpoint.FILE_NAME]


def test_a_refused_load_leaves_the_file(saved):
    before = saved.read_bytes()
    refusal(saved, CONFIG.replace(pos_len=19))
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [checkpoint.FILE_NAME]
