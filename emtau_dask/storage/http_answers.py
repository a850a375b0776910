"""Answers of HTTP servers, read only as far as was asked for; needs aiohttp."""

from __future__ import annotations

from aiohttp import ClientResponse

from emtau_dask.storage.errors import AnswerTooLongError, answer_limit

ERROR_PAGE_BYTES = 2**16


class BoundedResponse(ClientResponse):
    """An answer whose body is read up to the limit of the reading task, `answer_limit`."""

    async def read(self) -> bytes:
        """Return the body; of an error answer only the beginning."""
        if self._body is None:
            failed = self.status >= 400
            limit = ERROR_PAGE_BYTES if failed else answer_limit.get()
            pieces, received = [], 0
            try:
                async for piece in self.content.iter_any():
                    pieces.append(piece)
                    received += len(piece)
                    if received > limit:
                        self.close()
                        if failed:
                            break
                        raise AnswerTooLongError(f"it gave more than the {limit:,} bytes that were asked for")
            except BaseException:
                self.close()
                raise
            self._body = b"".join(pieces)
        return self._body
