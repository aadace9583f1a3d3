"""What a caller asks for and gets: sampling parameters, admission, text, the end of a request, outputs."""

from __future__ import annotations
