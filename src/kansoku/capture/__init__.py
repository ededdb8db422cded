"""What runs inside the user's process, and what watches it from outside.

``payload`` is copied into the job's environment by ``inject`` and records; ``payload.drain`` keeps
what the rings hold. Standard library only, Python 3.9 syntax.
"""

from kansoku.capture.inject import environment, write_payload

__all__ = ["environment", "write_payload"]
