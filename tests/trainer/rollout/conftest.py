from tests.trainer.loop.runs import group

__all__ = ["group"]
