"""A network with a delay: two devices, of which one lies in a network namespace, and a process that carries packets.

`python slow_link.py NAME SECONDS` makes the devices NAMEa and NAMEb, moves the second one into the namespace NAME, prints
a line, and delivers each packet that one side sends to the other one after so many seconds. It ends when its input does.
"""

import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque

SET_DEVICE, PACKETS_ALONE = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI
LONGEST = 65536
WAITING = 4096  # packets on their way, each direction; further ones are lost, as in a router


def device(name: str) -> int:
    """A new device whose packets are read and written here."""
    opened = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(opened, SET_DEVICE, struct.pack("16sH", name.encode(), PACKETS_ALONE))
    return opened


def carry(one: int, other: int, until: int, delay: float) -> None:
    """Deliver packets of both devices to the other one, `delay` seconds late, until the input `until` ends."""
    selector = selectors.DefaultSelector()
    for each in (one, other, until):
        selector.register(each, selectors.EVENT_READ)
    target = {one: other, other: one}
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in selector.select(wait):
            if key.fd == until:
                return
            packet = os.read(key.fd, LONGEST)
            if len(under_way) < 2 * WAITING:
                under_way.append((time.monotonic() + delay, target[key.fd], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, to, packet = under_way.popleft()
            try:
                os.write(to, packet)
            except OSError:  # the device is down, or full: the packet is lost
                continue


if __name__ == "__main__":
    name, seconds = sys.argv[1], float(sys.argv[2])
    here, there = device(f"{name}a"), device(f"{name}b")
    subprocess.run(["ip", "link", "set", f"{name}b", "netns", name], check=True)
    print("ready", flush=True)
    carry(here, there, sys.stdin.fileno(), seconds)
