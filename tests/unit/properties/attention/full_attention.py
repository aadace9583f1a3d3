"""An attention adapter that offers everything, in plain torch: row by row, correct, and easy to break on purpose."""

import math

import torch


class FullAttention:
    """float32 inside; keys in parts that are merged."""

    is_batch_invariant = True
    serves_masked_rows = True
    pad_slot = -1

    def attend(
        self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens,
        scale=None, window=None, softcap=None, num_splits=1,
    ):  # fmt: skip
        out, row = torch.zeros_like(q), 0
        for table, query_len, context_len in zip(block_tables, query_lens, context_lens, strict=True):
            k, v = (x[table].flatten(0, 1)[:context_len].float() for x in (k_cache, v_cache))
            for position in range(context_len - query_len, context_len):
                first = 0 if window is None else max(0, position - window + 1)
                parts = [
                    self.part(q[row].float(), k[at], v[at], scale, softcap)
                    for at in self.cut(first, position + 1, num_splits)
                ]
                outs, log_sums = (torch.stack(column)[:, None] for column in zip(*parts, strict=True))
                out[row] = self.merge(outs, log_sums)[0].to(q.dtype)
                row += 1
        return out

    def cut(self, first, stop, num_splits):
        size = max(1, -(-(stop - first) // num_splits))
        return [
            slice(first + i * size, max(first + i * size, min(stop, first + (i + 1) * size))) for i in range(num_splits)
        ]

    def part(self, q_NH, k_CKH, v_CKH, scale, softcap):
        k_CNH, v_CNH = (self.repeated(x, len(q_NH)) for x in (k_CKH, v_CKH))
        score_NC = torch.einsum("nh,cnh->nc", q_NH, k_CNH) * self.scale(scale, q_NH.shape[-1])
        if softcap is not None:
            score_NC = softcap * torch.tanh(score_NC / softcap)
        # Not exp(score - log_sum): the rounding of a large logarithm would scale the whole output.
        p_NC = torch.softmax(score_NC, dim=-1)
        return torch.einsum("nc,cnh->nh", p_NC, v_CNH), torch.logsumexp(score_NC, dim=-1)

    def repeated(self, x_CKH, num_heads):
        return x_CKH.repeat_interleave(num_heads // x_CKH.shape[1], dim=1)

    def scale(self, scale, head_dim):
        return head_dim**-0.5 if scale is None else scale

    def merge(self, out_PTNH, log_sum_PTN):
        largest_TN = log_sum_PTN.amax(dim=0)
        base_TN = torch.where(largest_TN == -math.inf, 0.0, largest_TN)
        w_PTN = torch.exp(log_sum_PTN - base_TN)
        total_TN = w_PTN.sum(dim=0)
        return (w_PTN[..., None] * out_PTNH).sum(dim=0) / torch.where(total_TN == 0, 1.0, total_TN)[..., None]

    def attend_padded(self, q, k, v, query_lens, context_lens):
        out = torch.zeros_like(q)
        for request, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
            out[request, :query_len] = self.attend(
                q[request, :query_len], k[request][None], v[request][None], block_tables=[[0]],
                query_lens=[query_len], context_lens=[context_len],
            )  # fmt: skip
        return out

    def store(self, k, v, slots, k_cache, v_cache):
        is_real = slots != self.pad_slot
        for cache, rows in ((k_cache, k), (v_cache, v)):
            cache.flatten(0, 1)[slots[is_real]] = rows[is_real]

    def read_back(self, k_cache, v_cache, block_table, num_tokens):
        return tuple(x[list(block_table)].flatten(0, 1)[:num_tokens] for x in (k_cache, v_cache))


class WindowTooLong(FullAttention):
    def attend(self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens, window=None):
        return super().attend(
            q, k_cache, v_cache, block_tables=block_tables, query_lens=query_lens, context_lens=context_lens,
            window=None if window is None else window + 1,
        )  # fmt: skip


class HeadsTiled(FullAttention):
    def repeated(self, x_CKH, num_heads):
        return x_CKH.repeat(1, num_heads // x_CKH.shape[1], 1)


class ScaleIgnored(FullAttention):
    def scale(self, scale, head_dim):
        return head_dim**-0.5


class CapIgnored(FullAttention):
    def part(self, q_NH, k_CKH, v_CKH, scale, softcap):
        return super().part(q_NH, k_CKH, v_CKH, scale, None)


class MergeInBaseTwo(FullAttention):
    """sglang#40903."""

    def merge(self, out_PTNH, log_sum_PTN):
        return super().merge(out_PTNH, log_sum_PTN * math.log(2))


class RescaleDropped(FullAttention):
    def merge(self, out_PTNH, log_sum_PTN):
        return out_PTNH.mean(dim=0)


class EmptyPartCounts(FullAttention):
    def merge(self, out_PTNH, log_sum_PTN):
        return super().merge(out_PTNH, log_sum_PTN.masked_fill(log_sum_PTN == -math.inf, 0.0))


class OverflowingMerge(FullAttention):
    def merge(self, out_PTNH, log_sum_PTN):
        w_PTN = torch.exp(log_sum_PTN)
        return (w_PTN[..., None] * out_PTNH).sum(dim=0) / w_PTN.sum(dim=0)[..., None]


class MaskedRowsNaN(FullAttention):
    def attend(self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens, scale=None, window=None):
        out = super().attend(
            q, k_cache, v_cache, block_tables=block_tables, query_lens=query_lens, context_lens=context_lens,
            scale=scale, window=window,
        )  # fmt: skip
        is_masked = torch.tensor(
            [n == 0 for n, q_len in zip(context_lens, query_lens, strict=True) for _ in range(q_len)]
        )
        return torch.where(is_masked[:, None, None], math.nan, out)


class PaddingAttended(FullAttention):
    def attend_padded(self, q, k, v, query_lens, context_lens):
        return super().attend_padded(q, k, v, query_lens, [k.shape[1]] * len(context_lens))


class PadSlotWritten(FullAttention):
    """vllm#43810."""

    def store(self, k, v, slots, k_cache, v_cache):
        k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots] = k, v


class Contagious(FullAttention):
    """One request's keys count for the others, by a hair."""

    def attend(self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens):
        out = super().attend(
            q, k_cache, v_cache, block_tables=block_tables, query_lens=query_lens, context_lens=context_lens
        )
        return out if len(block_tables) == 1 else (out.double() * (1 + 2.0**-24)).to(out.dtype)


class Placed(FullAttention):
    """Reads what belongs to nobody, and adds a trace of it."""

    def attend(self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens):
        out = super().attend(
            q, k_cache, v_cache, block_tables=block_tables, query_lens=query_lens, context_lens=context_lens
        )
        trace = k_cache.float().nan_to_num(posinf=1.0).amax() * 2.0**-22
        return (out.float() * (1 + trace.clamp(0, 2.0**-22))).to(out.dtype)


class Raises(FullAttention):
    def attend(self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens):
        if k_cache.shape[1] == 1:
            raise IndexError("block size 1")
        return super().attend(
            q, k_cache, v_cache, block_tables=block_tables, query_lens=query_lens, context_lens=context_lens
        )


class CacheZeroed(FullAttention):
    def attend(self, q, k_cache, v_cache, **options):
        out = super().attend(q, k_cache, v_cache, **options)
        k_cache.zero_()
        return out


class QueriesScaled(FullAttention):
    def attend(self, q, k_cache, v_cache, **options):
        out = super().attend(q, k_cache, v_cache, **options)
        q *= 0.5
        return out


class WrongShape(FullAttention):
    def attend(self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens):
        return (
            super()
            .attend(q, k_cache, v_cache, block_tables=block_tables, query_lens=query_lens, context_lens=context_lens)
            .flatten(1)
        )
