"""The context bank: all keys and values, on the device or in host memory."""

from engine.bank.device import DeviceBank
from engine.bank.tiered import TieredBank

__all__ = [
    "DeviceBank",
    "TieredBank",
]
