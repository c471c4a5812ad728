"""Patterns of statements by category, and the known gaps.

In a pattern, ``{...}`` is filled in by ``generate.py`` and ``holes.py``:

    f  a float tensor         y  one that may be combined with the first     x  any tensor
    g  one that requires grad i  an int64 tensor     b  a bool tensor        c  a complex one
    s  a single float         v  a vector            m  a matrix             e  a 3-D tensor
    r  floats of width 4      o  an outside tensor   P  a parameter          j  indices below 4
    d  a dim of the first     u  a dim of its unsqueeze                      K  a float constant
    N  a small int            index, slice, view, perm, sizes: for the first new  a new variable
"""

from __future__ import annotations

import re

# By name: the reason. ``--enable NAME`` generates such programs, or counts such a difference as a
# failure.
KNOWN_GAPS = {
    "numpy_write": "a write through an array that .numpy() gave away after the tensor was read",
    "second_backward": "a second backward through generic rules raises where eager saves nothing",
    "saved_write": "eager's error for a saved value that was written to: missing, or too strict",
    "hooks_off_path": "hooks of held values off the path of autograd.grad fire",
    "retain_off_path": "as hooks_off_path, for retain_grad",
    "no_grad_views": "eager's error for a view made without gradients whose base was written to",
    "hidden_write": "eager's gradient of what .data or copy.copy wrote to a saved value, no error",
    "grad_strides": "eager's gradients that are expanded (strides of 0), or views: ordinary ones",
    "no_grad_reshape": "of a view, or what was transpose_d, under no_grad: no gradient in eager",
    "clamp_bounds": "eager's backward of clamp by a bound of more dimensions raises an error",
    "eager_assert": "an internal assertion of PyTorch fails in eager mode only",
    "new_tensor": "no gap any more; programs of this kind are not made by default",
    "parameter": "as new_tensor",
    "forward_ad": "as new_tensor",
}

UNARY = """
torch.tanh({f}); torch.sigmoid({f}); torch.relu({f}); torch.sin({f}); torch.neg({f}); -{f};
{f}.abs(); {f}.cos(); {f}.exp(); torch.square({f}); {f}**2; {f}**3; 2**{f}; F.gelu({f});
F.silu({f}); F.softplus({f}); F.leaky_relu({f}); F.elu({f}); F.hardtanh({f},-0.3,0.4);
{f}.clamp(-0.4,0.5); {f}.clamp(min=0.1); torch.log1p({f}.abs()); ({f}.abs()+0.1).sqrt();
torch.erf({f}); {f}.sigmoid(); torch.rsqrt({f}*{f}+1); 1/({f}.abs()+0.5);
torch.log({f}.abs()+0.3); torch.floor({f}*3+0.37); torch.isnan({x}); ~{b};
torch.logical_not({x}); torch.nan_to_num({f}); torch.round({f}*2+0.13); F.tanhshrink({f});
torch.expm1({f}); torch.sinh({f}); torch.special.expit({f}); {f}.mul({K}); torch.positive({f});
F.relu6({f}*5); F.logsigmoid({f}); F.softsign({f}); torch.atan({f}); F.threshold({f},0.1,0.2);
F.dropout({f},0.0); F.dropout({f},0.5,training=False); {f}.frac()
"""

BINARY = """
{f}+{y}; {f}-{y}; {f}*{y}; {f}/({y}.abs()+0.5); torch.maximum({f},{y}); {f}+{N}; {f}*{K};
{K}-{f}; {N}*{f}; {f}+{K}; {f}/{N}; torch.minimum({f},{y}); torch.where({f}>{K},{f},{y});
torch.where({b},{f},{y}); torch.where({b},{f},{K}); torch.add({f},{y},alpha={K}); {f}>{K};
{f}<{y}+{K}; torch.sub({f},{y},alpha=2); torch.lerp({f},{y},{K});
torch.addcmul({f},{y},{y},value=0.5); {x}+{x}; torch.atan2({f},{y}.abs()+0.5);
torch.hypot({f},{y}+0.1); {x}*{x}; {x}*{K}; {x}+{N}; {i}//2; {i}%3; {i}+{i}; {i}*2; {i}/2;
{i}==1; {i}>{N}; {b}&{b}; {b}|{b}; {b}^{b}; {b}*{f}; {i}*{f}; {i}-{i}; {f}.pow(2); {f}.eq({f});
torch.logaddexp({f},{y}); torch.masked_fill({f},{b},{K}); {f}.masked_fill({f}>{K},{K}); 1.5*{x};
torch.addcdiv({f},{y},{y}.abs()+0.7); {f}+{P}; {P}*{f}; torch.clamp({f},{y}-1,{y}+0.3); {f}*{s};
{s}+{f}; torch.float_power({f}.abs()+0.1,2); F.mse_loss({f},{y},reduction='none');
torch.fmod({f},0.31); {f}*{o}; {o}+{f}; torch.copysign({f},{y}+0.01);
torch.sum(torch.stack([{f},{y}]),0); ({f}+{y})*({f}-{y}); torch.tanh({f}+{y});
torch.sigmoid({f})*{y}; {f}*torch.tanh({y})+{y}*0.3
"""

MATMUL = """
{r}@{W}; F.linear({r},{W}); F.linear({r},{W},{B}); torch.addmm({B},{m},{W}); {m}@{m};
{m}@{m}.t(); torch.mm({m},{m}); {m}@{v}; torch.mv({m},{v}); torch.dot({v},{v});
torch.outer({v},{v}); {v}@{m}; torch.matmul({f},{y}); {e}@{e};
torch.bmm({e},{e}.transpose(1,2)); {m}@{W}.t(); {W}@{v}; {r}@{W}+{B};
torch.einsum('ij,kj->ik',{m},{m}); torch.einsum('ij,jk->ik',{m},{W});
torch.einsum('...i,i->...',{r},{B}); torch.tanh({r}@{W});
torch.addmm({f},{m},{m},beta=0.5,alpha=2); torch.baddbmm({e},{e},{e}); {m}.t()@{m};
torch.chain_matmul({m},{W},{W}); F.bilinear({r},{r},{W}.unsqueeze(0)); {m}@{o}; {o}@{m};
torch.addmv({v},{m},{v}); torch.linalg.norm({f}); torch.kron({v}.clone(),{v}.clone());
torch.tensordot({m},{W},1); F.linear({r},{Z}); {r}@{Z}; L0({r}); L1({r}); E0({j});
F.embedding({j},{W}); F.embedding({j},{W})@{W}; F.scaled_dot_product_attention({e},{e},{e});
torch.cdist({m},{m}+0.3); F.linear({r},{W})+{r}
"""

CELLS = """
{new},{new}=C0({m},({m},{m})); {new}=C1({m},{m}); {new}=C1({v},{v}); {new},{new}=C0({m});
{new}=C1({m}); {new},{new}=C0({v})
"""

REDUCE = """
{f}.sum(); {f}.mean(); {f}.sum({d}); {f}.mean({d}); {f}.sum({d},keepdim=True); {f}.amax({d});
{f}.amin({d}); {f}.prod({d}); {f}.var({d}); {f}.std({d},unbiased=False); {f}.norm();
torch.logsumexp({f},{d}); F.softmax({f},{d}); F.log_softmax({f},{d}); F.softmax({f},-1);
F.log_softmax({f},-1); {f}.argmax({d}); {f}.argmax(); {f}.argmin(-1); {f}.cumsum({d});
{f}.cumprod({d}); {b}.any(); {b}.all(); {b}.sum(); {b}.sum({d}); {i}.sum(); {i}.max();
{f}.max(); {f}.min(); {f}.flip({d}); {f}.roll(1,{d}); {m}.tril(); {m}.triu(1);
torch.count_nonzero({x}); F.layer_norm({r},(4,),{B},{B}); F.layer_norm({r},(4,)); N0({r});
{f}.mean(({d},)); F.normalize({f},dim={d}); {f}.sum(0); {f}.mean(0); {f}.diff(dim={d});
F.cross_entropy({m},{j}); {f}.median(); F.cross_entropy({r},{j});
F.nll_loss(F.log_softmax({m},1),{j}); F.cross_entropy({m},{j},reduction='sum');
F.mse_loss({f},{y}); F.binary_cross_entropy_with_logits({f},torch.sigmoid({y}));
F.l1_loss({f},{y}); F.smooth_l1_loss({f},{y}); F.cosine_similarity({r},{r},-1);
F.one_hot({j},4); torch.trace({m}); {e}.sum((0,2)); F.cross_entropy({v},{j}.sum()%4);
torch.bincount({j}); F.avg_pool1d({e},1); {f}.nansum(); {f}.cummax({d})[0]
"""

REDUCE_PAIRS = """
{new},{new}={f}.max({d}); {new},{new}={f}.sort({d}); {new},{new}=torch.topk({f},1,{d});
{new},{new}={f}.min({d}); {new},{new}=torch.var_mean({f},{d});
{new},{new}={f}.sort({d},descending=True); {new},{new}={f}.aminmax(); {new}={f}.topk(2,{d})[0];
{new}={f}.sort({d})[0]
"""

JOIN = """
torch.cat([{f},{y}],{d}); torch.cat([{f},{y}]); torch.stack([{f},{y}]);
torch.stack([{f},{f}],-1); torch.stack([{f},{y},{y}],{u}); torch.cat([{f},{f}],-1);
torch.cat([{x},{x}]); torch.hstack([{f},{y}]); torch.vstack([{f},{y}]); torch.cat([{f},{P}]);
torch.stack([{s},{s}]); torch.cat([{r},{o}]); F.pad({f},(1,0)); F.pad({f},(1,2),value={K});
torch.cat([{m},{W}]); {f}.repeat(2,*[1]*({f}.dim()-1)); torch.cat([{v},{v}]);
{f}.repeat_interleave(2,{d}); torch.cat([{f}[:1],{f}[1:]]); torch.stack({f}.unbind(0));
{f}.tile((2,)); torch.cat(torch.split({f},1)); torch.broadcast_tensors({f},{y})[0];
torch.meshgrid({v},{v},indexing='ij')[0]; torch.cat([{f},{x}]); torch.stack([{x},{x}]);
torch.block_diag({m},{m}); F.pad({f},(-1,0))
"""

SPLIT = """
{new},{new}={f}.chunk(2,{d}); {new},*_={f}.unbind({d}); {new},{new}=torch.split({r},[1,3],-1);
{new},{new},{new},{new}={r}.unbind(-1); {new},{new}={f}.tensor_split(2,{d});
{new},{new}={f}.split([1,1],{d}); {new},*_={f}.split(2,{d}); *_,{new}={f}.unbind(0);
{new},{new}={f}; *_,{new}={f}.chunk(3,{d}); {new},{new},*_=[torch.tanh(row) for row in {f}];
{new}=sum(row for row in {f})
"""

INDEX = """
{x}[{index}]; {f}[{index}]; {f}[{index}]; {f}[{slice}]; {f}[{j}]; {f}[:,{j}]; {f}.select({d},0);
{f}.select({d},-1); {f}.narrow({d},0,1); {f}.narrow({d},1,1); {f}.index_select({d},{j});
{f}.gather({d},{i}%1); {W}[{j}]; {W}[{N}];
torch.take_along_dim({f},{f}.argmax({d},keepdim=True),{d}); {f}.take({j}); {f}[{j},{j}];
{f}[[0,-1]]; {f}[...,[1,0]]; {f}[torch.tensor([0,0])]; {f}[{s}.argmax()]; {f}[:,None];
{f}[...,::2]; {f}[None,...,0]; {x}[{j}%1]; {f}.unfold(0,1,1); {f}.index_select(0,{j}%1);
{f}.gather(-1,{j}[:,None]); {r}[...,1:3]; {r}[...,-1]; {f}.index_add({d},{j}%1,{f});
{f}.scatter({d},{i}%1,{K}); {f}.index_fill({d},{j}%1,{K}); {m}.diag(); {v}.diag();
{f}.masked_scatter({b},{y}); torch.index_put({f},({j}%1,),{y}[:1]);
{f}.slice_scatter({y}[:1],0,0,1); {f}.select_scatter({y}[0],0,0);
{f}.scatter_add({d},{i}%1,{y}); {f}.scatter_reduce({d},{i}%1,{y},'mean');
{f}.scatter_reduce({d},{i}%1,{y},'amax',include_self=False);
{f}.scatter_add(0,{j}[:,None].expand(-1,2)%1,{y});
{f}.index_reduce({d},{j}%1,{f},'amin'); torch.index_put({f},({j}%1,),{y}[:1],accumulate=True);
{f}[torch.arange({f}.shape[0])%2==0];
{x}[torch.ones({x}.shape[0],dtype=torch.bool)]; {f}[[0,-1],[0]];
{f}.masked_select(torch.ones({f}.shape)>0); torch.where({f}>{K},{f},{y})[[0]];
{f}[torch.eye({f}.shape[0])[0].bool()]; {f}[torch.zeros({f}.shape[0]).bool(),0]
"""

MASKED = """
{f}[{f}>{K}]; {f}[{b}]; {f}.nonzero(); torch.masked_select({f},{b}); ({x}*3+0.13).round().unique();
torch.where({b})[0]
"""

VIEW = """
{f}.view({view}); {f}.reshape({view}); {f}.view(-1); {f}.reshape(-1); {f}.flatten();
{f}.transpose(0,-1); {m}.t(); {m}.T; {f}.mT; {f}.permute({perm}); {f}.unsqueeze({u});
{f}.squeeze(); {f}.squeeze({d}); {f}[None]; {f}.expand({expand}); {f}.expand(2,*{f}.shape);
{f}.as_strided({strided}); {m}.diagonal(); {f}.movedim(0,-1); {f}.swapaxes(0,-1);
{x}.view({x}.shape); {f}.view_as({f}); {f}.unflatten(0,(-1,1)); {f}.detach(); {f}.data;
{f}.contiguous(); {f}.reshape({f}.shape); {f}.expand_as({y}); {f}.broadcast_to({expand});
{x}.reshape(-1); {x}.unsqueeze(0); {f}.alias(); {f}.narrow(0,0,1); {f}.ravel();
{f}.unfold(-1,2,1); {f}.transpose(-1,-2).contiguous(); {f}.reshape(-1,2); {f}.reshape(2,-1);
{f}[...,0]; {f}.T.reshape(-1); {f}.squeeze(0); {f}.unsqueeze(-1); {f}.adjoint(); {f}.positive();
{x}.data; {x}.detach(); {f}.select(0,0); {f}.real; {f}.diagonal(1,0,-1)
"""

COMPLEX = """
torch.complex({f},{f}); torch.view_as_complex(torch.stack([{f},{f}],-1)); {c}.real; {c}.imag;
{c}.abs(); {c}.conj(); {c}*{c}; {c}+{f}; torch.view_as_real({c}); {c}.conj().imag;
{c}.resolve_conj(); {c}.sum(); {c}.angle(); {c}*1j; {c}.conj()*{c};
torch.view_as_real({c}.resolve_conj()); {c}.mH; {f}*1j; {c}.conj().real; {c}[0];
torch.view_as_complex({f}.reshape(-1,2)); torch.view_as_complex({r}.unflatten(-1,(2,2)));
torch.view_as_complex({r}[...,2:]); {c}.mul_({K}); {c}.real.add_({K}); {c}.imag.copy_({c}.real);
{c}[...]={c}*2; {c}.conj().mul_(1j); torch.view_as_real({c}).zero_(); {c}.reshape(-1);
{c}.transpose(0,-1); {c}.detach().mul_(2); {c}.conj_physical()
"""

CAST = """
{f}.double(); {f}.to({dtype}); {x}.to({dtype}); ({f}*3).long(); {f}.bool(); {x}.to(torch.int32);
{x}.double(); {f}.type_as({x}); {x}.to({f}); {f}.to(torch.float64); {b}.to({dtype});
{x}.clone(); {f}.clone(); {f}.to('cpu'); {x}.cpu(); {i}.double(); {b}.double();
({f}>{K}).double(); {f}.clone().requires_grad_(); {f}.detach().clone().requires_grad_();
{f}.data.requires_grad_(); {x}.to({dtype},copy=True); {f}+0; ({f}*2).int();
{f}.to(torch.float32); {f}.to(torch.int64)
"""

FACTORY = """
torch.zeros_like({f}); {f}.new_zeros(2,4); torch.ones_like({x}); {f}.new_full((3,),0.5);
torch.full_like({f},0.3); torch.arange(4); torch.eye(4); torch.empty_like({f}).copy_({f});
torch.tensor(0.5); torch.tensor(2); torch.zeros({f}.shape[0],4); {f}.new_ones({f}.shape);
torch.arange({f}.shape[0]); torch.zeros_like({f},requires_grad=True);
torch.zeros_like({f}).add_({f}); torch.as_tensor({f}); {f}.new_empty(3).fill_({K});
torch.linspace(0,1,4); torch.zeros({f}.shape).index_add_(0,{j}%1,{f}[:1]);
torch.full((2,),0.25); torch.arange(4.).to({f}).add_({r}[0]);
torch.ones({f}.shape).cumsum(0).to({f}).mul_({f})
"""

FUNCTION = """
Twice.apply({f}); Twice.apply({f})+{f}; Reversed.apply({f}); Both.apply({f},2.0)[0];
sum(Both.apply({f},{K})); Reversed.apply({f}*2); torch.vmap(torch.tanh)({f});
torch.func.grad(lambda t:(t*t).sum())({f}); copy.deepcopy({f}.detach());
pickle.loads(pickle.dumps({f}.detach())); Q0({m}); torch.vmap(lambda t:t*{s})({f});
torch.utils.checkpoint.checkpoint(torch.tanh,{f},use_reentrant=False); copy.copy({f})
"""

IN_PLACE = """
{f}.add_({y}); {f}.mul_({K}); {f}+={y}; {f}*={K}; {f}-={y}; {f}.sub_({y},alpha=0.5);
{f}.copy_({y}); {f}.zero_(); {f}.fill_({K}); {f}.tanh_(); {f}.sigmoid_(); {f}.relu_();
{f}.clamp_(-0.3,0.4); {f}[{index}]={K}; {f}[{index}]+={K}; {f}[{index}]*={K}; {f}[{slice}]={y};
{f}[{slice}]={f}[{slice}]; {f}[0]={y}; {f}[0]+={y}; {f}[-1].mul_({K}); {f}[{j}]={K};
{f}[{f}>{K}]={K}; {f}.masked_fill_({b},{K}); {f}.masked_fill_({f}>{K},{K});
{f}.index_put_(({j}%1,),{y}[:1]); {f}.index_add_(0,{j}%1,{y}); {f}.scatter_({d},{i}%1,{K});
{f}.index_fill_({d},{j}%1,{K}); {f}.addcmul_({y},{y}); {f}.view(-1)[0]={K}; {f}.t().mul_({K});
{f}.transpose(0,-1).add_({y}); {f}.data.add_({K}); {f}.detach().mul_({K}); {f}.data[0]={K};
{f}.unsqueeze_({u}); {f}.squeeze_(); {f}.transpose_(0,-1); {m}.t_(); {f}.requires_grad_();
torch.add({f},{y},out={f}); torch.mul({f},{y},out={o}); torch.matmul({m},{m},out={o});
{o}.copy_({f}); {o}.add_({f}); {o}.mul_({K}); {o}.zero_(); {o}.fill_({K}); {o}[0]={f};
{o}[{index}]={K}; {o}+={y}; {f}[...,0].copy_({y}); {x}.copy_({x}); {f}.diagonal().fill_({K});
{f}.unbind(0)[0].mul_({K}); {f}.chunk(2)[0].add_({y}); {f}.mul_({f}); {f}.add_({f}.sum());
{f}.copy_({f}.flip(0)); {f}[1:]=({f}[:-1]); {f}[:-1].add_({f}[1:]); {i}.add_(1).remainder_(4);
{b}.logical_not_(); {i}[0]=1; {f}.exp_().clamp_(max=2); {f}.neg_(); {f}.div_({y}.abs()+0.7);
{f}.lerp_({y},{K}); {f}.addmm_({m},{m}); {f}.set_data({y}); F.relu({f},inplace=True);
{f}.detach_(); {f}.index_copy_(0,{j}[:1]%1,{y}[:1]); {f}.swapaxes_(0,-1);
{f}.masked_scatter_({b},{y}); {f}.data={y}; {f}[[0]]={K}; {f}[:,{index}]={K};
{f}[...]=torch.stack([uncounted({f}),{y}]).logsumexp(0); {f}[...]=(uncounted({f})+{y}).sigmoid();
{o}[...]=torch.stack([uncounted({o}),{o}*{K}]).logsumexp(0); {o}[...]=({o}.detach()+{K}).tanh();
{f}[None][0].mul_({K}); {f}.view_as({f}).mul_({K}); {f}.square_(); {f}.put_({j}%1,{y});
{f}.abs_().add_(0.1).pow_(-0.5); {f}.pow_(2); {f}[torch.arange({f}.shape[0])%2==0]={K};
{f}[torch.ones({f}.shape[0],dtype=torch.bool)]={f}; {f}.ldexp_({y});
{f}[[0,-1]]={f}[[-1,0]]; {f}.index_put_(({j}%1,),{y}[:1],accumulate=True);
{f}[torch.zeros({f}.shape[0]).bool()]={K}; {f}.float_power_(2)
"""

READ = """
log.append({s}.item()); log.append({f}.tolist()); log.append(bool({f}.sum()>{K}));
log.append(float({s})); log.append({f}.detach().numpy().copy()); log.append(len({x}));
log.append(tuple({x}.shape)); log.append({x}.requires_grad); log.append({x}.is_contiguous());
log.append(int(({s}*3).round())); log.append({f}.nonzero().shape); log.append({x}.is_leaf);
log.append({x}.grad_fn is None); log.append({x}.dim()); log.append({x}.detach().clone());
log.append(str({x}.dtype)); log.append(torch.equal(*({f},)*2));
log.append(torch.allclose({f},{y},atol=0.05)); log.append(len(repr({x}))>0);
log.append({x}.element_size()); log.append({f}.storage_offset());
log.append({x}.numel()); log.append([float(t) for t in ({v})]); log.append({j}.tolist());
log.append({f}.data_ptr()==0); log.append({x}.is_inference());
log.append({f}.untyped_storage().nbytes()>=0); log.append({s}.__format__('.2f')[:1]);
log.append({f}.isnan().any().item())
"""

FLUSH = """
scope.flush()
"""

GRAD = """
{f}.sum().backward(); {f}.sum().backward(retain_graph=True); {g}.retain_grad();
{g}.retain_grad(); {g}.sum().backward(retain_graph=True);
{g}.backward(torch.ones_like({g}),retain_graph=True);
{g}.register_hook(lambda g:hooks['{last}'].append(g.clone())); {g}.register_hook(lambda g:g*2);
{new},=torch.autograd.grad({g}.sum(),[{g}],retain_graph=True,allow_unused=True);
{new},=torch.autograd.grad({g}.sum(),[{g}],allow_unused=True);
{new},=torch.autograd.grad({g}.sum(),[{P}],retain_graph=True,allow_unused=True);
{new},{new}=torch.autograd.grad([{g}.sum(),{g}.sum()],[{g},{P}],retain_graph=True,allow_unused=True);
{new},=torch.autograd.grad({g}.sum(),[{g}],create_graph=True,allow_unused=True);
{new},=torch.autograd.grad({g}.sum(),[{P}],create_graph=True,allow_unused=True);
{new},=torch.autograd.grad(({g}*{g}).sum(),[{P}],create_graph=True,allow_unused=True);
{g}.mean().backward(); ({g}*{g}).sum().backward(); scope.backward({g}.sum());
{P}.register_hook(lambda g:g*0.5); {g}.sum().backward(inputs=[{P}],retain_graph=True);
{g}.sum().backward(inputs=[{g}],retain_graph=True); {g}.register_hook(lambda g:None)
"""

STEP = """
W0.grad=None; torch.optim.SGD([W0,B0],0.1).step(); W0.data.mul_(0.9); W0.data=W0.data*0.9;
W1.requires_grad_(False); W1.requires_grad_(); W0.detach().add_(0.1); B0.data.fill_(0.2)
"""

CONTEXT = [
    ("torch.no_grad()", 6),
    ("torch.enable_grad()", 3),
    ("torch.set_grad_enabled(False)", 1),
    ("torch.set_grad_enabled(True)", 1),
    ("batch()", 3),
    ("torch.inference_mode()", 1),
    ("torch.autograd.set_detect_anomaly(False)", 1),
]

# Patterns that are used only if the gap is enabled: (category, pattern).
GATED = {
    "new_tensor": [("factory", "{f}.new_tensor([0.5,1.0])")],
    "parameter": [("factory", "nn.Parameter({f})"), ("factory", "nn.Parameter({f}.detach())")],
    "numpy_write": [("in_place", "{o}.numpy()[...]={K}")],
    "forward_ad": [("function", "torch.func.jvp(torch.tanh,({f},),({f},))[1]")],
}


def _split(text: str) -> list[str]:
    return [pattern.strip() for pattern in text.split(";")]


# By category: (weight, whether its patterns are expressions for a new variable, patterns).
CATEGORIES: dict[str, tuple[int, bool, list[str]]] = {
    "unary": (14, True, _split(UNARY)),
    "binary": (16, True, _split(BINARY)),
    "matmul": (12, True, _split(MATMUL)),
    "cells": (2, False, _split(CELLS)),
    "reduce": (10, True, _split(REDUCE)),
    "pairs": (2, False, _split(REDUCE_PAIRS)),
    "join": (6, True, _split(JOIN)),
    "split": (4, False, _split(SPLIT)),
    "index": (9, True, _split(INDEX)),
    "masked": (1, True, _split(MASKED)),
    "view": (14, True, _split(VIEW)),
    "complex": (2, True, _split(COMPLEX)),
    "cast": (4, True, _split(CAST)),
    "factory": (3, True, _split(FACTORY)),
    "function": (2, True, _split(FUNCTION)),
    "in_place": (14, False, _split(IN_PLACE)),
    "read": (4, False, _split(READ)),
    "flush": (1, False, _split(FLUSH)),
    "grad": (4, False, _split(GRAD)),
    "step": (1, False, _split(STEP)),
}


def leave_out(regex: str | None) -> None:
    """Removes matching patterns and contexts from all programs generated later."""
    if regex is None:
        return
    for _, _, patterns in CATEGORIES.values():
        patterns[:] = [p for p in patterns if not re.search(regex, p)] or patterns
    CONTEXT[:] = [c for c in CONTEXT if not re.search(regex, c[0])]
