"""Checksums of tensors by their bytes, on their device: no read by the host.

With the bytes as little-endian 64-bit words ``w``, each folded to ``f(w) = w ^ (w >> 32)``, in rows of K = 4096::

    checksum = sum_r (2r + 1) G sum_k a_k f(w[r K + k])   mod 2**64

where ``a`` are odd pseudo-random numbers and G is 2**64 divided by the golden ratio, made odd: multilinear hashing
(Lemire and Kaser 2014, "Strongly universal string hashing is fast", section 2). Any change of one word changes it, and
words that have changed places do; of any two different tensors, the checksums are equal with a probability of at most
about 2**-32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_WORDS = 4096  # of a row
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_HOST_ROWS, _DEVICE_ROWS = 64, 4096  # at once: 2 MiB stay in a core's cache, 128 MiB fill a GPU


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The checksum of each, as int64 in one tensor on ``device``; any dtype; of no bytes and on meta, 0.

    A GPU is given five small kernels for each 128 MiB, and the host reads nothing.
    """
    tables: dict[torch.device, torch.Tensor] = {}
    found = [torch.zeros(1, dtype=torch.int64, device=device)[:0]]
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device=device)
        for place, part in enumerate(_plain(tensor)):
            if part.device not in tables:
                tables[part.device] = _multipliers(part.device)
            total = total + (2 * place + 1) * _checksum(part, tables[part.device]).to(device)
        found.append(total.reshape(1))
    return torch.cat(found)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory that a tensor is made of: itself, or those inside of a wrapper subclass."""
    if tensor.is_meta or not tensor.numel():
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _checksum(tensor: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    words = _words(tensor)
    whole = words.numel() // _WORDS * _WORDS
    rows, rest = words[:whole].view(-1, _WORDS), words[whole:]
    step = _HOST_ROWS if tensor.device.type == "cpu" else _DEVICE_ROWS
    sums = [_folded(part).mul_(multipliers).sum(1) for part in torch.split(rows, step)] if whole else []
    if rest.numel():
        sums.append(_folded(rest).mul_(multipliers[: rest.numel()]).sum().reshape(1))
    of_rows = torch.cat(sums)
    return of_rows.mul_(torch.arange(of_rows.numel(), device=of_rows.device).mul_(2).add_(1).mul_(_GOLDEN)).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as 64-bit words, without a copy where they are aligned and fill them."""
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if content.numel() % 8 or content.storage_offset() % 8 or content.data_ptr() % 8:
        padded = content.new_zeros(-(-content.numel() // 8) * 8)
        padded[: content.numel()] = content
        content = padded
    return content.view(torch.int64)


def _folded(words: torch.Tensor) -> torch.Tensor:
    """The high half of each word xored into its low half: the top bits of a factor are lost in a product."""
    return (words >> 32).bitwise_xor_(words)


def _multipliers(device: torch.device) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(0x9E3779B9)
    return (torch.randint(-(2**62), 2**62, (_WORDS,), generator=numbers) * 2 + 1).to(device)
