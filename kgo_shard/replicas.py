"""Are replicas what they are called? Every replicated leaf, hashed on every device.

The type system proves it of what leaves the step; a bit that flipped in memory, or an array that somebody placed by hand,
it does not see.
"""

import hashlib

import jax
import numpy as np


class ReplicaError(RuntimeError):
    """A leaf that should be the same on all devices is not; the message names the leaf and the devices."""


def digests(leaf: jax.Array) -> dict[str, str]:
    """Device -> hash of the bytes that it holds of a replicated array; those of this process."""
    return {str(shard.device): hashlib.blake2b(np.asarray(shard.data).tobytes(), digest_size=16).hexdigest() for shard in leaf.addressable_shards}


def check_replicas(tree) -> int:
    """Compare the replicas of every fully replicated leaf; the number of leaves that were. Raises ReplicaError."""
    checked = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not (isinstance(leaf, jax.Array) and leaf.is_fully_replicated):
            continue
        found = digests(leaf)
        first, *others = found.items()
        apart = [device for device, digest in others if digest != first[1]]
        if apart:
            raise ReplicaError(
                f"leaf {jax.tree_util.keystr(path)}: {', '.join(apart)} {'holds' if len(apart) == 1 else 'hold'} other bits than {first[0]}: "
                "resume from the last checkpoint; if it happens again, suspect the device"
            )
        checked += 1
    return checked
