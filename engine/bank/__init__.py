"""The context bank: K and V of all tokens, on the device or in host memory."""

from engine.bank.base import Bank, SparseRows
from engine.bank.device import DeviceBank
from engine.bank.host.tiered import TieredBank

__all__ = [
    "Bank",
    "DeviceBank",
    "SparseRows",
    "TieredBank",
]
