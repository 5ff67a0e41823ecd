"""What SGLang asks of parts of its own HiCache, answered by the tiers."""

from __future__ import annotations

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tree.host_tier import HostTier


class HostPoolFacade:
    """What SGLang's metrics ask of a host pool: sizes in tokens."""

    def __init__(self, host: HostTier) -> None:
        self._host = host

    @property
    def logical_size(self) -> int:
        return self._host.num_slots * BLOCK_TOKENS

    def available_size(self) -> int:
        return self._host.free_slots * BLOCK_TOKENS

    def clear(self) -> None:
        """Asked when the tree is reset, which clears the tiers itself."""


class ControllerFacade:
    """What SGLang asks of the controller of its HiCache. It copies and writes nothing."""

    write_policy = "none"
    enable_storage = False
    pp_prefetch_command_group = None

    def __init__(self, host: HostPoolFacade, storage: str) -> None:
        """storage: what is shown as the storage back end of a hit: a class's name, for SGLang."""
        self.mem_pool_host = host
        self.storage_backend = type(storage, (), {})()
        self.storage_backend_type = storage

    def reset(self) -> None:
        """As `HostPoolFacade.clear`."""

    def start_writing(self) -> None:
        """Backups that are due: none are."""
