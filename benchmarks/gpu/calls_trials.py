"""Parts of calls, one by one: what binding could reach. For one reading; not kept."""

import ctypes
import importlib
import time
import traceback

import torch

from benchmarks.gpu.calls import BATCH, GPU, SIZES, measure
from te_fuser.kernels.attention import PROVIDERS
from te_fuser.kernels.attention.provider import operator_of
from te_fuser.kernels.attention.providers import cudnn_frontend as provider_frontend
from te_fuser.kernels.attention.views import Views, lying, packed_forms
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4, quack_matmul
from te_fuser.ops.dot_product_attention import DotProductAttention

BY_NAME = {p.name: p for p in PROVIDERS}


def say(name, call, rounds=25):
    try:
        call()
        line = measure(name, call, rounds)
        print(f"{line.us:9.2f} {line.fastest:9.2f}  {name}", flush=True)
    except Exception as error:
        print(f"   FAILED  {name}: {type(error).__name__}: {error}", flush=True)


def parts():
    x = torch.randn(256, 1, 1536, device=GPU, dtype=torch.bfloat16)
    say("torch.empty", lambda: torch.empty((256, 512), dtype=torch.bfloat16, device=GPU))
    say("x.new_empty", lambda: x.new_empty((256, 512)))
    say("torch.empty_like", lambda: torch.empty_like(x))
    say("as_strided", lambda: x.as_strided((1, 4, 256, 128), (1536, 128, 1536, 1), 0))
    say("transpose", lambda: x.transpose(0, 1))
    say("view", lambda: x.view(256, 1536))
    say("detach", lambda: x.detach())
    say("data_ptr", lambda: x.data_ptr())
    say("is_contiguous", lambda: x.is_contiguous())
    say("stride()", lambda: x.stride())
    say("torch.cuda.device(0)", lambda: torch.cuda.device(0).__enter__())
    def ctx():
        with torch.cuda.device(0):
            pass
    say("with torch.cuda.device(0)", ctx)
    def ctx2():
        with torch.no_grad():
            pass
    say("with torch.no_grad()", ctx2)
    say("torch._C._cuda_getDevice", torch._C._cuda_getDevice)
    say("current_stream().cuda_stream", lambda: torch.cuda.current_stream().cuda_stream)
    say("_cuda_getCurrentRawStream", lambda: torch._C._cuda_getCurrentRawStream(0))
    say("is_current_stream_capturing", torch.cuda.is_current_stream_capturing)
    say("x + x", lambda: x + x)
    say("x.zero_()", lambda: x.zero_())
    op = DotProductAttention(4, 128, mask="causal")
    views = Views(op.settings(), 1, 256)
    say("Views(...)", lambda: Views(op.settings(), 1, 256))
    say("views.split", lambda: views.split(x))
    say("packed_forms", lambda: packed_forms(op.settings(), 1, 256))
    say("op.settings()", op.settings)
    say("hash(settings)", lambda s=op.settings(): hash(s))
    y = torch.randn(256, 1, 512, device=GPU, dtype=torch.bfloat16)
    say("views.split_output", lambda: views.split_output(y))


def operators(sizes):
    op = DotProductAttention(sizes.heads, sizes.head_dim, mask="causal")
    x = torch.randn(sizes.positions, sizes.batch, op.packed.features, device=GPU, dtype=torch.bfloat16)
    views = Views(op.settings(), sizes.batch, sizes.positions)
    q, k, v = views.split(x)
    s = op.scale
    for dropout in (0.0, 0.1):
        where = f"{sizes.name}, dropout {dropout}"
        f = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        say(f"aten cudnn, overload, {where}", lambda: f(q, k, v, None, True, dropout, True, False, scale=s))
        say(f"aten cudnn, overload._op, {where}", lambda: f._op(q, k, v, None, True, dropout, True, False, scale=s))
        g = torch._scaled_dot_product_cudnn_attention
        say(f"aten cudnn, torch._C, {where}", lambda: g(q, k, v, None, True, dropout, True, False, scale=s))
        out, lse, _, _, _, _, seed, offset, _ = f(q, k, v, None, True, dropout, True, False, scale=s)
        dy = torch.randn_like(out)
        b = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        n = sizes.positions
        for how, fn in (("overload", b), ("overload._op", b._op)):
            say(
                f"aten cudnn backward, {how}, {where}",
                lambda: fn(dy, q, k, v, out, lse, seed, offset, None, None, None, n, n, dropout, True, scale=s),
            )
        f2 = torch.ops.aten._scaled_dot_product_flash_attention.default
        say(f"aten flash, overload, {where}", lambda: f2(q, k, v, dropout, True, False, scale=s))
        g2 = torch._scaled_dot_product_flash_attention
        say(f"aten flash, torch._C, {where}", lambda: g2(q, k, v, dropout, True, False, scale=s))
        f3 = torch.ops.aten._scaled_dot_product_efficient_attention.default
        say(f"aten efficient, overload, {where}", lambda: f3(q, k, v, None, True, dropout, True, scale=s))
        g3 = torch._scaled_dot_product_efficient_attention
        say(f"aten efficient, torch._C, {where}", lambda: g3(q, k, v, None, True, dropout, True, scale=s))
        out, lse, _, _, _, _, seed, offset, _ = f2(q, k, v, dropout, True, False, scale=s)
        b2 = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        say(
            f"aten flash backward, overload, {where}",
            lambda: b2(dy, q, k, v, out, lse, None, None, n, n, dropout, True, seed, offset, scale=s),
        )
        out, lse, seed, offset = f3(q, k, v, None, True, dropout, True, scale=s)
        b3 = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
        say(
            f"aten efficient backward, overload, {where}",
            lambda: b3(dy, q, k, v, None, out, lse, seed, offset, dropout, [True, True, True, False], True, scale=s),
        )
    say(f"_fused_sdp_choice-free sdpa (functional), {sizes.name}", lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=s))


def frontend(sizes):
    cudnn = cudnn_frontend._package()
    print("cudnn", cudnn.__version__, "backend", cudnn.backend_version(), "torch", torch.backends.cudnn.version())
    for dropout in (0.0, 0.1):
        op = DotProductAttention(sizes.heads, sizes.head_dim, mask="causal", dropout=dropout)
        settings = op.settings()
        provider = BY_NAME["cuda_cudnn_frontend"]
        x = torch.randn(sizes.positions, sizes.batch, op.packed.features, device=GPU, dtype=torch.bfloat16)
        y, saved = provider.forward(settings, x)
        dy = torch.randn_like(y)
        provider.backward(settings, {"input": x, "output": y, **saved}, dy)
        where = f"{sizes.name}, dropout {dropout}"
        graph = provider_frontend._graph(settings, sizes.batch, sizes.positions, x.dtype, 0)
        g, handle, p = graph._graph, graph._handle, graph._problem
        dx = torch.empty_like(x)
        packed = (p.q, p.k, p.v)
        tensors = [lying(x, form) for form in packed] + [lying(y, p.out), lying(dy, p.out)]
        kept = tuple(saved.values())
        tensors += [t.contiguous() for t in (kept if p.dropout else kept[:1])]
        tensors += [lying(dx, form) for form in packed]
        workspace = torch.empty(graph._workspace or 1, dtype=torch.uint8, device=GPU)
        print("workspace", graph._workspace, "selected engine", g.selected_engine, "index", g._plan_index, "cpp", g._plans[g._plan_index].cpp_index, "uids", graph._uids, g._variant_pack_uids(), [m for m in dir(g._lowered_graph) if "execute" in m or "variant" in m])
        stream = torch.cuda.current_stream().cuda_stream
        say(f"set_stream, {where}", lambda: cudnn.set_stream(handle=handle, stream=stream))
        say(f"graph.execute, {where}", lambda: g.execute(tensors, workspace, handle=handle, tensor_uids=graph._uids))
        pointers = [t.data_ptr() for t in tensors]
        say(f"graph.execute of ints, {where}", lambda: g.execute(pointers, workspace, handle=handle, tensor_uids=graph._uids))
        by_uid = dict(zip(graph._uids, pointers))
        low, raw = g._lowered_graph, handle.backend_handle
        index = g._plans[g._plan_index].cpp_index
        say(f"lowered._execute_plan_at_index(dict of ints), {where}", lambda: low._execute_plan_at_index(by_uid, workspace.data_ptr(), index, raw, None, None, None))
        schema = g._prepare_ordered_binding_schema()
        say(f"lowered._execute_ordered, {where}", lambda: low._execute_ordered(schema, tensors, graph._uids, g._data_bindings, workspace, None, None, None, raw, index))
        order = g._variant_pack_uids()
        array = (ctypes.c_void_p * len(order))(*(by_uid[u] for u in order))
        address = ctypes.addressof(array)
        say(f"lowered._execute_with_raw_ptrs, {where}", lambda: low._execute_with_raw_ptrs(address, len(order), workspace.data_ptr(), raw, index))
        def fill():
            (ctypes.c_void_p * len(order))(*[t.data_ptr() for t in tensors])
        say(f"filling pointers of {len(order)}, {where}", fill)
        forward_graph(cudnn, handle, sizes, op, x, dropout, where)


def forward_graph(cudnn, handle, sizes, op, x, dropout, where):
    """Its own forward beside the operator's."""
    try:
        kinds, io = cudnn.data_type, cudnn.data_type.BFLOAT16
        g = cudnn.pygraph(io_data_type=io, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle)
        views = Views(op.settings(), sizes.batch, sizes.positions)
        q, k, v = views.split(x)
        out = views.new_output(x)
        b, h, s, d = q.shape
        lse = torch.empty(b, h, s, 1, device=GPU, dtype=torch.float32)
        names = {"q": q, "k": k, "v": v}
        made = {n: g.tensor(name=n, dim=tuple(t.shape), stride=t.stride(), data_type=io, uid=u + 1) for u, (n, t) in enumerate(names.items())}
        tensors = [q, k, v]
        if dropout:
            for n in ("seed", "offset"):
                tensors.append(torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=GPU))
                made[n] = g.tensor(name=n, dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kinds.INT64, uid=len(tensors))
            made["dropout"] = (dropout, made.pop("seed"), made.pop("offset"))
        o, stats = g.sdpa(**made, attn_scale=op.scale, use_causal_mask=True, generate_stats=True)
        uids = list(range(1, len(tensors) + 3))
        o.set_output(True).set_uid(uids[-2]).set_dim(tuple(out.shape)).set_stride(out.stride()).set_data_type(io)
        stats.set_output(True).set_uid(uids[-1]).set_data_type(kinds.FLOAT)
        tensors += [out, lse]
        g.validate(); g.build_operation_graph(); g.create_execution_plans([cudnn.heur_mode.A]); g.check_support(); g.build_plans()
        size = g.get_workspace_size()
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=GPU)
        g.execute(tensors, workspace, handle=handle, tensor_uids=uids)
        torch.cuda.synchronize()
        f = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        want = f(q, k, v, None, True, 0.0, True, False, scale=op.scale)
        print("forward graph workspace", size, "engine", g.selected_engine, "plan", g.get_plan_name_at_index(g._plan_index))
        if not dropout:
            print("same output", torch.equal(want[0], out), float((want[0].float() - out.float()).abs().max()), "same lse", torch.equal(want[1].flatten(), lse.flatten()))
        low, index, order = g._lowered_graph, g._plans[g._plan_index].cpp_index, g._variant_pack_uids()
        by_uid = dict(zip(uids, (t.data_ptr() for t in tensors)))
        array = (ctypes.c_void_p * len(order))(*(by_uid[u] for u in order))
        address, raw = ctypes.addressof(array), handle.backend_handle
        say(f"forward graph.execute, {where}", lambda: g.execute(tensors, workspace, handle=handle, tensor_uids=uids))
        say(f"forward _execute_with_raw_ptrs, {where}", lambda: low._execute_with_raw_ptrs(address, len(order), workspace.data_ptr(), raw, index))
    except Exception:
        traceback.print_exc()


def flash4(sizes):
    module = flash_attn_4._module()
    utils = importlib.import_module("flash_attn.cute.utils")
    op = DotProductAttention(sizes.heads, sizes.head_dim, mask="causal")
    provider, settings = BY_NAME["cuda_flash_attn_4"], op.settings()
    x = torch.randn(sizes.positions, sizes.batch, op.packed.features, device=GPU, dtype=torch.bfloat16)
    # Only what this size compiled, so that it is found again.
    for cache in (module._flash_attn_fwd, module._flash_attn_bwd, module._bwd_preprocess, module._bwd_postprocess_convert):
        print(type(cache.compile_cache).__name__, len(cache.compile_cache.cache))
        cache.compile_cache.cache.clear()
    y, saved = provider.forward(settings, x)
    dy = torch.randn_like(y)
    lse = saved["flash4_logsumexp"]
    provider.backward(settings, {"input": x, "output": y, **saved}, dy)
    views = Views(settings, sizes.batch, sizes.positions)
    q, k, v = (t.transpose(1, 2) for t in views.split(x))
    out, dout = (views.split_output(t).transpose(1, 2) for t in (y, dy))
    (fwd,) = module._flash_attn_fwd.compile_cache.cache.values()
    (bwd,) = module._flash_attn_bwd.compile_cache.cache.values()
    (pre,) = module._bwd_preprocess.compile_cache.cache.values()
    (post,) = module._bwd_postprocess_convert.compile_cache.cache.values()
    print("compiled", type(fwd), type(fwd).__mro__)
    aux, s = utils.AuxData(None, None), op.scale
    say(f"FA4 _flash_attn_fwd, {sizes.name}", lambda: module._flash_attn_fwd(q=q, k=k, v=v, softmax_scale=s, causal=True, out=out, lse=lse))
    say(f"FA4 compiled forward, {sizes.name}", lambda: fwd(q, k, v, out, lse, s, None, None, None, None, None, None, None, None, None, aux, None, None))
    n = -(-sizes.positions // 128) * 128
    b, h, d = sizes.batch, sizes.heads, sizes.head_dim
    b, h = q.shape[0], q.shape[2]
    cfg = module._tile_size_bwd_sm90(d, d, True, False, sparse_block_size_q=None)
    print(cfg)
    m = -(-sizes.positions // cfg.m_block_size) * cfg.m_block_size
    dq_accum = torch.empty(b, h, m * d, dtype=torch.float32, device=GPU)
    dpsum, lse2 = (torch.empty(b, h, m, dtype=torch.float32, device=GPU) for _ in range(2))
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    say(f"FA4 _flash_attn_bwd, {sizes.name}", lambda: module._flash_attn_bwd(q=q, k=k, v=v, out=out, dout=dout, lse=lse, dq=dq, dk=dk, dv=dv, softmax_scale=s, causal=True))
    say(f"FA4 compiled pre, {sizes.name}", lambda: pre(out, dout, dpsum, lse, lse2, dq_accum, None, None, None, None, None, 1.0, None, None))
    say(f"FA4 compiled backward, {sizes.name}", lambda: bwd(q, k, v, dout, lse2, dpsum, dq_accum, dk, dv, s, None, None, None, None, None, None, None, None, None, aux, None, None))
    say(f"FA4 compiled post, {sizes.name}", lambda: post(dq_accum, dq, s, None, None, None, None))
    want = [t.clone() for t in (dq, dk, dv)]
    module._flash_attn_bwd(q=q, k=k, v=v, out=out, dout=dout, lse=lse, dq=dq, dk=dk, dv=dv, softmax_scale=s, causal=True)
    print("same gradients", [float((a.float() - c.float()).abs().max()) for a, c in zip(want, (dq, dk, dv))])
    try:
        show_native(fwd)
    except Exception:
        traceback.print_exc()


def show_native(f):
    print("native:", {n: getattr(f, n) for n in dir(f) if "handle" in n.lower() or "ptr" in n.lower() or "addr" in n.lower()})


def quack(sizes):
    module = importlib.import_module("te_fuser.kernels.packages.quack_epilogues")
    gated = importlib.import_module("te_fuser.kernels.packages.quack_gated_epilogues")
    interface, config = quack_matmul._module("quack.gemm_interface"), quack_matmul._config()
    bf = dict(dtype=torch.bfloat16, device=GPU)
    dy, w, h = torch.randn(sizes.rows, sizes.narrow, **bf), torch.randn(sizes.narrow, sizes.wide, **bf), torch.randn(sizes.rows, sizes.wide, **bf)
    dh, y = torch.empty_like(h), torch.empty_like(h)
    quack_matmul.input_gradient_dgelu_sum(dy, w, h)
    out = {"D": dh.t(), "activated": y.t()}
    a, b, c = w.t(), dy.t(), h.t()
    mod = module.dgelu_with_sum
    say(f"quack dgelu __call__, {sizes.name}", lambda: mod(a, b, c, out=out, config=config, tuned=False))
    plan = mod.plan(a, b, c, out=out, config=config)
    say(f"quack dgelu EpiPlan.run, {sizes.name}", lambda: plan.run(a, b, c, out=out))
    g = plan.gemm_plan
    print(type(g.compiled_fn).__mro__, g.call_ops, g.arg_template, "static scheduler", g.scheduler_static, {k: v.shape for k, v in plan.scratch.items()}, "swapped", plan.swapped)
    fields = dict(g.arg_template)
    values = {**plan.scratch, "activated": out["activated"]}
    for name, convert, key in g.call_ops:
        value = values.get(name)
        fields[name] = convert(value, key) if convert else value
    args = g.gemm_cls.EpilogueArguments._make(fields.values())
    say(f"quack dgelu compiled_fn, {sizes.name}", lambda: g.compiled_fn(a, b, out["D"], c, args, g.scheduler_static, None, None, None))
    flat = tuple(fields.values())
    say(f"quack dgelu compiled_fn, plain tuple, {sizes.name}", lambda: g.compiled_fn(a, b, out["D"], c, flat, g.scheduler_static, None, None, None))
    try:
        import tvm_ffi

        sched = tvm_ffi.convert(tuple(g.scheduler_static))
        say(f"quack dgelu compiled_fn, scheduler as ffi.Array, {sizes.name}", lambda: g.compiled_fn(a, b, out["D"], c, args, sched, None, None, None))
        show_native(g.compiled_fn)
    except Exception:
        traceback.print_exc()
    total = plan.scratch["total"]
    say(f"quack finalize, {sizes.name}", lambda: mod._finalize_sink("total", total, None, g))
    say(f"total.sum(-1), {sizes.name}", lambda: total.sum(-1))
    h2 = torch.randn(sizes.rows, 2 * sizes.wide, **bf)
    dh2 = torch.empty_like(h2)
    gate, up, dgate, dup = (t.t() for t in (*h2.chunk(2, 1), *dh2.chunk(2, 1)))
    out2 = {"D": dgate, "up_gradient": dup, "activated": y.t()}
    plan2 = gated.dswiglu_of_halves.plan(a, b, gate, out=out2, up=up, config=config)
    say(f"quack dswiglu EpiPlan.run, {sizes.name}", lambda: plan2.run(a, b, gate, out=out2, up=up))
    x, w2, bias = torch.randn(sizes.rows, sizes.narrow, **bf), torch.randn(sizes.wide, sizes.narrow, **bf), torch.randn(sizes.wide, **bf)
    for before in (None, dh):
        say(
            f"quack gemm_act, before {before is not None}, {sizes.name}",
            lambda: interface.gemm_act(x, w2.t(), bias=bias, activation="gelu_tanh_approx", preact_out=before, postact_out=y, store_preact=before is not None, tuned=False, config=config),
        )
    try:
        library = importlib.import_module("quack.epilogue.library")
        print("library mods", [n for n in dir(library) if "act" in n.lower()])
    except Exception:
        traceback.print_exc()


def tvm():
    import tvm_ffi

    print("tvm_ffi", tvm_ffi.__version__)
    x = torch.randn(256, 1536, device=GPU, dtype=torch.bfloat16)
    echo = tvm_ffi.get_global_func("testing.nop", allow_missing=True)
    print("nop", echo)
    if echo is not None:
        say("ffi nop of 3 tensors", lambda: echo(x, x, x))
        say("ffi nop of nothing", lambda: echo())
        say("ffi nop of a tuple of 3 tensors", lambda: echo((x, x, x)))
        say("ffi nop of a tuple of 3 None", lambda: echo((None, None, None)))
        say("ffi nop of 18 None", lambda: echo(*(None,) * 18))


def main():
    with torch.no_grad():
        start = time.perf_counter()
        for name, part, sized in (("parts", parts, False), ("tvm", tvm, False), ("operators", operators, True), ("frontend", frontend, True), ("quack", quack, True), ("flash4", flash4, True)):
            for sizes in reversed(SIZES) if sized else (None,):
                print(f"--- {name} {'' if sizes is None else sizes.name} ({time.perf_counter() - start:.0f} s)", flush=True)
                try:
                    part(sizes) if sized else part()
                except Exception:
                    traceback.print_exc()


if __name__ == "__main__":
    main()
