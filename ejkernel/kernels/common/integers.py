"""Integer arithmetic for sizes of tiles and blocks."""


def round_up(number: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-number // multiple) * multiple


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is not above `most`; 1 where there is none."""
    return next(d for d in range(max(1, min(number, most)), 0, -1) if number % d == 0)
