"""A pull that can be stopped from another thread."""

from __future__ import annotations

from hutch.errors import NotPermitted, Unauthorized

from . import layers
from .http import HttpClient
from .progress import PullProgress, Report
from .reference import Reference
from .registry import Registry
from .store import StoredImage, bring


class ImagePull:
    """One pull of an image under its own name."""

    def __init__(self, name: Reference) -> None:
        self._name = name
        self._web = HttpClient()
        self.progress = PullProgress()
        self.stored: StoredImage | None = None

    def run(self, report: Report) -> None:
        """Raises what `Registry` and `bring` raise, but NotPermitted instead of Unauthorized."""
        try:
            with Registry(self._name, self._web) as source:
                wanted = {layer.diff_id: layer.size for layer in source.image.layers}
                self.progress.expect(
                    {id: size for id, size in wanted.items() if not layers.root_of(id).is_dir()}
                )
                self.stored = bring(source, self._name, report)
        except Unauthorized as exc:
            # The caller of a server would take that for a word on its own key.
            raise NotPermitted(str(exc)) from exc

    def stop(self) -> None:
        """Make `run` end soon, also while it waits for the registry."""
        self._web.stop()
