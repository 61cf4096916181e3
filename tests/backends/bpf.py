"""A classic BPF interpreter, as strict as the kernel's own check of a seccomp filter.

With it a filter can be asked about every call there is, on every architecture, without a kernel.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

from hutch.backends.linux.seccomp import AUDIT_ARCH, NATIVE

LONGEST = 4096  # BPF_MAXINSNS


def evaluate(
    program: bytes,
    nr: int,
    args: Sequence[int] = (),
    arch: int = AUDIT_ARCH.get(NATIVE, 0),
) -> int:
    """What the kernel would do with this call. Raises ValueError if it would not load the filter.

    Arguments that are not given are zero; negative ones are as the register would hold them.
    """
    registers = [value & 0xFFFFFFFF_FFFFFFFF for value in (*args, 0, 0, 0, 0, 0, 0)[:6]]
    # struct seccomp_data: number, architecture, instruction pointer, arguments.
    data = struct.unpack("=16I", struct.pack("=IIQ6Q", nr & 0xFFFFFFFF, arch, 0, *registers))
    code = _checked(program)
    at = accumulator = 0
    while True:
        operation, yes, no, value = code[at]
        at += 1
        match operation:
            case 0x20:
                accumulator = data[value // 4]
            case 0x54:
                accumulator &= value
            case 0x05:
                at += value
            case 0x15:
                at += yes if accumulator == value else no
            case 0x35:
                at += yes if accumulator >= value else no
            case 0x45:
                at += yes if accumulator & value else no
            case 0x06:
                return value


@lru_cache
def _checked(program: bytes) -> list[tuple[int, int, int, int]]:
    code = list(struct.iter_unpack("=HBBI", program))
    if not 0 < len(code) <= LONGEST:
        raise ValueError(f"a filter of {len(code)} instructions")
    for at, (operation, yes, no, value) in enumerate(code):
        rest = len(code) - at - 1
        match operation:
            case 0x20:
                sound = rest > 0 and value % 4 == 0 and value < 64
            case 0x54:
                sound = rest > 0
            case 0x05:
                sound = value < rest
            case 0x15 | 0x35 | 0x45:
                sound = yes < rest and no < rest
            case 0x06:
                sound = True
            case _:
                sound = False
        if not sound:
            raise ValueError(f"instruction {at} is not one a filter may have")
    return code
