from tests.worker.conftest import make_lab

__all__ = ["make_lab"]
