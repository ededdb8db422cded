"""What runs inside the user's process: standard library only, Python 3.9 syntax, fails open.

``kansoku.capture.inject`` copies this package, with ``kansoku.model.ring``, into a folder of its
own under the name ``_kansoku``; nothing here may import kansoku once it is there.
"""
