"""Event-by-event simulation of a training step, the reference for the closed forms.

It uses no formula, only the conditions under which each device may continue.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Device:
    """State of a device during a step."""

    seconds: list[float]
    handed_over: list[float]
    done_after: list[int]
    optimizer: float
    begins: float
    entry: int = 0
    clock: float = 0.0
    left: float | None = None
    ended: list[float] = field(default_factory=list)

    def ready(self, bucket: int) -> float | None:
        """Return the time at which a bucket became ready, or None."""
        done = self.done_after[bucket]
        if done > len(self.ended):
            return None
        return self.ended[done - 1] if done else self.begins

    @property
    def computing(self) -> bool:
        return self.entry < len(self.seconds)


def simulated(
    devices: list[Device], transfers: list[float]
) -> tuple[list[float], list[float], list[float]]:
    """Return the times when buckets are sent, buckets arrive, and devices end their optimizers."""
    now = 0.0
    sent: list[float] = []
    arrived: list[float] = []
    travelling: float | None = None
    while len(arrived) < len(transfers) or any(device.computing for device in devices):
        if travelling is None and len(sent) < len(transfers):
            moments = [device.ready(len(sent)) for device in devices]
            if all(moment is not None and moment <= now for moment in moments) and now >= max(
                device.begins for device in devices
            ):
                travelling = transfers[len(sent)]
                sent.append(now)
        busy = [device for device in devices if device.computing]
        until: list[float] = []
        for device in busy:
            if device.begins > now:
                until.append(device.begins - now)
                continue
            if device.left is None and device.handed_over[device.entry] <= device.clock:
                device.left = device.seconds[device.entry]
            ahead = (
                device.handed_over[device.entry] - device.clock
                if device.left is None
                else device.left
            )
            until.append(ahead)
        if travelling is not None:
            until.append(travelling)
        after = min(until)
        # The next event is the minimum itself, regardless of rounded sums.
        for device, left in zip(busy, until, strict=False):
            if device.begins > now:
                continue
            next_one = left == after
            if device.left is None:
                device.clock = (
                    device.handed_over[device.entry] if next_one else device.clock + after
                )
            else:
                device.clock += after
                device.left = 0.0 if next_one else device.left - after
                if next_one:
                    device.ended.append(now + after)
                    device.entry, device.left = device.entry + 1, None
        if travelling is not None:
            travelling = travelling - after if until[-1] > after else None
            if travelling is None:
                arrived.append(now + after)
        late = [
            device.begins for device in busy if device.begins > now and device.begins - now == after
        ]
        now = late[0] if late else now + after
    last = max(arrived, default=0.0)
    computed = [device.ended[-1] if device.ended else device.begins for device in devices]
    synchronized = [max(end, last) if transfers else end for end in computed]
    return (
        sent,
        arrived,
        [end + device.optimizer for end, device in zip(synchronized, devices, strict=True)],
    )
