"""Unpacking, history and symmetries on the device: exact, to the sign of zero."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kgo_shard import augment
from kgo_shard.config import Config
from kgo_shard.batches import read_packed_batches

BOARD = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
# The eight images of BOARD, written out.
IMAGES = [
    [[1, 2, 3], [4, 5, 6], [7, 8, 9]],  # identity
    [[3, 6, 9], [2, 5, 8], [1, 4, 7]],  # transpose, flip rows
    [[9, 8, 7], [6, 5, 4], [3, 2, 1]],  # flip both
    [[7, 4, 1], [8, 5, 2], [9, 6, 3]],  # transpose, flip columns
    [[1, 4, 7], [2, 5, 8], [3, 6, 9]],  # transpose
    [[3, 2, 1], [6, 5, 4], [9, 8, 7]],  # flip columns
    [[9, 6, 3], [8, 5, 2], [7, 4, 1]],  # transpose, flip both
    [[7, 8, 9], [4, 5, 6], [1, 2, 3]],  # flip rows
]
# Entry [j][i]: the image that image j of image i is. 1 and 3 turn by a quarter and undo each other.
COMPOSITION = [
    [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 2, 3, 0, 7, 4, 5, 6],
    [2, 3, 0, 1, 6, 7, 4, 5],
    [3, 0, 1, 2, 5, 6, 7, 4],
    [4, 5, 6, 7, 0, 1, 2, 3],
    [5, 6, 7, 4, 3, 0, 1, 2],
    [6, 7, 4, 5, 2, 3, 0, 1],
    [7, 4, 5, 6, 1, 2, 3, 0],
]


def test_the_images_are_the_specifications():
    table = augment.symmetry_table(3)
    assert table.shape == (8, 9) and table.dtype == np.int32
    for k, image in enumerate(IMAGES):
        np.testing.assert_array_equal(BOARD.reshape(-1)[table[k]].reshape(3, 3), image, err_msg=f"image {k}")


@pytest.mark.parametrize("pos_len", [2, 3, 9, 19])
def test_every_image_is_a_permutation(pos_len):
    for row in augment.symmetry_table(pos_len):
        np.testing.assert_array_equal(np.sort(row), np.arange(pos_len * pos_len))


@pytest.mark.parametrize("pos_len", [3, 9, 19])
def test_images_of_images_are_the_right_images(pos_len):
    table = augment.symmetry_table(pos_len)
    assert len({row.tobytes() for row in table}) == 8
    for i in range(8):
        for j in range(8):
            image_of_image = table[i][table[j]]  # value at a point of j's image is i's value at table[j]
            np.testing.assert_array_equal(image_of_image, table[COMPOSITION[j][i]], err_msg=f"image {j} of image {i}")


def test_bits_are_unpacked_big_endian():
    packed = np.zeros((1, 1, 11), np.uint8)
    packed[0, 0, 0] = 0b10000001  # points 0 and 7
    packed[0, 0, 1] = 0b01000000  # point 9: row 1, column 0
    packed[0, 0, 10] = 0b11111111  # point 80, and seven bits beyond the board
    planes = np.asarray(augment.unpack(packed, 9))
    assert planes.shape == (1, 1, 9, 9) and planes.dtype == np.float32
    assert [tuple(map(int, point)) for point in np.argwhere(planes[0, 0])] == [(0, 0), (0, 7), (1, 0), (8, 8)]
    assert set(np.unique(planes)) == {0, 1}


def test_each_row_is_turned_by_its_own_symmetry():
    rand = np.random.default_rng(0)
    planes = rand.standard_normal((8, 2, 3, 3)).astype(np.float32)
    values = rand.standard_normal((8, 5, 3, 3)).astype(np.float32)
    policy = rand.standard_normal((8, 2, 10)).astype(np.float32)
    arrays = {"binaryInputNCHW": planes, "valueTargetsNCHW": values, "policyTargetsNCMove": policy}
    turned = augment.turn(arrays, np.arange(8, dtype=np.int32), 3)
    assert set(turned) == set(arrays)
    for k in range(8):
        order = np.array(IMAGES[k]).reshape(-1) - 1
        for key, channels in (("binaryInputNCHW", 2), ("valueTargetsNCHW", 5)):
            expected = arrays[key][k].reshape(channels, 9)[:, order].reshape(channels, 3, 3)
            np.testing.assert_array_equal(turned[key][k], expected)
        np.testing.assert_array_equal(turned["policyTargetsNCMove"][k, :, :9], policy[k, :, order].T)
        np.testing.assert_array_equal(turned["policyTargetsNCMove"][k, :, 9], policy[k, :, 9])  # pass stays


def specified_history(planes, global_inputs, include):
    """The specification's matrices, applied row by row in float32."""
    base = np.diag(np.ones(22, np.float32))
    base[[9, 10, 11, 12, 13, 15, 16], [9, 10, 11, 12, 13, 15, 16]] = 0
    base[14, 15] = base[14, 16] = 1
    moves = np.zeros((5, 22, 22), np.float32)
    for move, (row, column), value in (
        (0, (9, 9), 1), (0, (14, 15), -1), (0, (14, 16), -1), (0, (15, 15), 1), (0, (15, 16), 1),
        (1, (10, 10), 1), (1, (15, 16), -1), (1, (16, 16), 1),
        (2, (11, 11), 1), (3, (12, 12), 1), (4, (13, 13), 1),
    ):  # fmt: skip
        moves[move][row, column] = value
    matrix = base + np.einsum("ni,ijl->njl", include, moves)
    kept = np.concatenate([include, np.ones((len(include), 14), np.float32)], axis=1)
    return np.einsum("nihw,nil->nlhw", planes, matrix), global_inputs * kept


drop_history = jax.jit(augment.drop_history)
expand = jax.jit(augment.expand, static_argnames="pos_len")


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    planes=hnp.arrays(np.float32, (2, 22, 3, 3), elements=st.integers(-3, 3)),
    global_inputs=hnp.arrays(np.float32, (2, 19), elements=st.floats(-2, 2, width=32, allow_subnormal=False)),
    include=hnp.arrays(np.float32, (2, 5), elements=st.sampled_from([0, 1])),
)
def test_history_is_dropped_as_by_the_specifications_matrices(planes, global_inputs, include):
    # Also for patterns that are never drawn (a move kept after one that is not): the two are the same map.
    dropped = drop_history(planes, global_inputs, include)
    expected_planes, expected_globals = specified_history(planes, global_inputs, include)
    np.testing.assert_array_equal(dropped["binaryInputNCHW"], expected_planes)
    assert np.asarray(dropped["globalInputNC"]).tobytes() == expected_globals.tobytes()


def test_a_forgotten_move_clears_its_plane_and_betrays_nothing_in_the_ladders():
    planes = np.zeros((1, 22, 2, 2), np.float32)
    planes[0, 9:14] = 1
    planes[0, 14, 0, 0] = planes[0, 15, 0, 1] = planes[0, 16, 1, 0] = 1
    now, one_ago, two_ago = planes[0, 14], planes[0, 15], planes[0, 16]
    for kept, expected_one, expected_two in ((5, one_ago, two_ago), (2, one_ago, two_ago), (1, one_ago, one_ago), (0, now, now)):
        include = (np.arange(5) < kept).astype(np.float32)[None]
        got = np.asarray(drop_history(planes, np.ones((1, 19), np.float32), include)["binaryInputNCHW"])[0]
        np.testing.assert_array_equal(got[9:14, 0, 0], include[0])
        np.testing.assert_array_equal(got[14], now)
        np.testing.assert_array_equal(got[15], expected_one)
        np.testing.assert_array_equal(got[16], expected_two)


def test_what_the_batch_carries_decides_and_expansion_is_exact_to_the_sign(rows9):
    config = Config(pos_len=9, batch_size=32, symmetry_type="xyt", enable_history_matrices=True)
    packed = next(read_packed_batches(sorted((rows9 / "train").glob("*.npz")), config, 1))
    packed["historyInclude"][:4] = [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    planes = np.unpackbits(packed["binaryInputNCHWPacked"], axis=-1, count=81).reshape(32, 22, 9, 9).astype(np.float32)
    table = augment.symmetry_table(9)[packed["symmetry"][0]]
    for history in (False, True):
        for symmetry in (False, True):
            batch = {k: v for k, v in packed.items() if (k != "historyInclude" or history) and (k != "symmetry" or symmetry)}
            expected = {"binaryInputNCHW": planes, "globalInputNC": packed["globalInputNC"]}
            if history:
                expected = dict(zip(expected, specified_history(*expected.values(), packed["historyInclude"])))
            for key in ("policyTargetsNCMove", "globalTargetsNC", "scoreDistrN", "valueTargetsNCHW"):
                expected[key] = packed[key].astype(np.float32)
            if symmetry:
                for key in ("binaryInputNCHW", "valueTargetsNCHW"):
                    shape = expected[key].shape
                    expected[key] = expected[key].reshape(*shape[:2], 81)[..., table].reshape(shape)
                policy = expected["policyTargetsNCMove"]
                expected["policyTargetsNCMove"] = np.concatenate([policy[..., table], policy[..., 81:]], axis=-1)
            got = expand(batch, pos_len=9)
            assert set(got) == set(expected)
            for key, value in got.items():
                assert value.dtype == np.float32 and np.asarray(value).tobytes() == expected[key].tobytes(), (history, symmetry, key)
    # What is expanded already is left alone.
    again = expand({key: np.asarray(value) for key, value in got.items()}, pos_len=9)
    assert all(np.asarray(again[key]).tobytes() == np.asarray(got[key]).tobytes() for key in got)
