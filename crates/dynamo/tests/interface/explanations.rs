//! What `explain()` tells, as data and as text.

use kiln_dynamo::{Compile, explain};
use kiln_tensor::{DType, Error, Result, Tensor, no_grad};

use crate::{leaf, t};

#[test]
fn breaks_say_where_why_and_what_helps() -> Result<()> {
    let w = leaf(&[1.0, 2.0]);
    w.set_label("layers.3.fc.weight");
    let explanation = explain(|| {
        let y = t(&[1.0, 2.0]).mul(&w)?.sum()?;
        if y.item::<f32>()? > 0.0 { y.exp() } else { y.neg() }
    })?;
    let at = &explanation.breaks[0];
    assert!(at.loc.to_string().starts_with("explanations.rs:"), "{explanation}");
    assert_eq!(
        (at.module.as_deref(), &at.reason),
        (Some("layers.3.fc"), &kiln_dynamo::Reason::Value { what: "item" })
    );
    assert!(at.advice().unwrap().contains("where_"));
    let text = explanation.to_string();
    assert!(text.contains("(after layers.3.fc): item needs the value\n  hint: read it after"), "{text}");
    Ok(())
}

/// `Display` is not told who called it, and can't return an error of ours.
#[test]
fn printing_names_its_line_and_is_an_error_in_one_graph() -> Result<()> {
    let x = t(&[1.0, 2.0]);
    let line = line!() + 3;
    let program = |prints: bool| {
        let y = x.exp()?;
        let text = if prints { format!("{y}") } else { String::new() };
        y.neg().map(|y| (y, text))
    };
    let region = Compile::new().region();
    for _ in 0..3 {
        let (_, text) = region.run(|| program(true))?;
        assert_eq!(text, "tensor([2.7183, 7.3891])");
    }
    let explanation = region.explain();
    let whole = Compile::new().fullgraph(true).region();
    for _ in 0..2 {
        let error = whole.run(|| program(true)).unwrap_err().to_string();
        let expected =
            format!("fullgraph: the graph breaks at explanations.rs:{line}: printing needs the value");
        assert_eq!(error, expected);
        // The call that failed leaves nothing behind.
        assert_eq!(whole.run(|| program(false))?.1, "");
    }
    let breaks: Vec<_> =
        explanation.breaks.iter().map(|at| (at.loc.to_string(), at.reason.to_string())).collect();
    assert_eq!(
        breaks,
        [(format!("explanations.rs:{line}"), "printing needs the value".into())],
        "{explanation}"
    );
    Ok(())
}

/// Steps that run together on bands of rows say so.
#[test]
fn steps_in_bands_are_told() -> Result<()> {
    let x = Tensor::ones([4, 600, 16], &kiln_tensor::Device::Cpu)?;
    let attention = || x.matmul(&x.transpose(-2, -1)?)?.softmax(-1)?.matmul(&x);
    let explanation = explain(attention)?;
    if kiln_runtime::Compiler::find().is_err() {
        return Ok(());
    }
    let together = explanation.graphs[0].steps.iter().filter(|step| step.joined.is_some());
    assert_eq!(together.count(), 2, "{explanation}");
    Ok(())
}

#[test]
fn guards_are_told_in_words() -> Result<()> {
    let w = leaf(&[1.0, 2.0, 3.0]);
    w.set_label("scale");
    let x = Tensor::ones([3, 4], &kiln_tensor::Device::Cpu)?.t()?;
    let explanation = explain(|| x.mul(&w)?.sum()?.backward())?;
    let guards: Vec<String> = explanation.graphs[0].guards.iter().map(ToString::to_string).collect();
    assert_eq!(
        guards,
        [
            "input 0 is f32[4, 3] with strides [1, 4]",
            "input 1 (scale) is f32[3], a leaf that requires a gradient"
        ]
    );
    assert_eq!(explanation.graphs[0].ops, [("mul", 1), ("sum", 1), ("backward", 1)]);
    Ok(())
}

#[test]
fn many_inputs_alike_are_one_line() -> Result<()> {
    let tensors: Vec<Tensor> = (0..100).map(|_| t(&[1.0, 2.0])).collect();
    let explanation = explain(|| tensors.iter().try_fold(t(&[0.0, 0.0]), |sum, x| sum.add(x)))?;
    assert_eq!(explanation.graphs[0].guards.len(), 101);
    let text = format!("{explanation:#}");
    assert!(text.contains("guard: inputs 0 to 100 are f32[2]\n") && text.lines().count() < 40, "{text}");
    assert!(!explanation.to_string().contains("guard:"), "{explanation}");
    Ok(())
}

#[test]
fn parameters_that_no_backward_reached_are_named() -> Result<()> {
    let (used, lost, idle) = (leaf(&[1.0]), leaf(&[2.0]), leaf(&[3.0]));
    used.set_label("head.used");
    lost.set_label("head.lost");
    let explanation = explain(|| {
        let y = used.mul(3.0)?;
        let _cut = lost.mul(2.0)?.detach()?.add(&y)?;
        y.sum()?.backward()?;
        let _guard = no_grad();
        idle.mul_(2.0)?; // used where no gradient is asked for
        Ok::<_, Error>(())
    })?;
    assert_eq!(explanation.without_gradient(), ["head.lost"], "{explanation}");
    assert!(explanation.to_string().contains("without a gradient: head.lost\n"), "{explanation}");
    assert!(lost.grad().is_none() && used.grad().is_some());
    let explanation = explain(|| used.mul(&lost)?.sum()?.backward())?;
    assert!(explanation.without_gradient().is_empty(), "{explanation}");
    Ok(())
}

#[test]
fn recompiles_carry_their_line_and_number() -> Result<()> {
    let region = Compile::new().dynamic(false).option("recompile_limit", 2)?.region();
    for size in 1..=5usize {
        let x = t(&vec![1.0; size]);
        assert_eq!(region.run(|| x.exp())?.numel(), size);
    }
    let explanation = region.explain();
    let numbers: Vec<usize> = explanation.recompiles.iter().map(|r| r.number).collect();
    assert_eq!(numbers, [1, 2, 3], "{explanation}");
    assert!(explanation.recompiles[0].loc.to_string().starts_with("explanations.rs:"));
    assert!(explanation.given_up && explanation.to_string().contains("eagerly from now on"));
    assert!(explanation.fallbacks[0].advice().unwrap().contains("recompile_limit"));
    Ok(())
}

#[test]
fn stages_are_timed() -> Result<()> {
    let w = leaf(&[1.0, 2.0]);
    let region = Compile::new().option("graph_cache", false)?.region();
    region.run(|| w.exp()?.sum()?.backward())?;
    let explanation = region.explain();
    let stages: Vec<&str> = explanation.graphs[0].times().iter().map(|(name, _)| *name).collect();
    match &explanation.graphs[0].interpreted {
        None => assert_eq!(stages, ["capture", "aot", "prims", "inductor", "C compile"], "{explanation}"),
        Some(_) => assert_eq!(stages[..2], ["capture", "aot"], "{explanation}"),
    }
    Ok(())
}

#[test]
fn options_are_shown() -> Result<()> {
    let compile: Compile = "name=step, mode=evaluation, dynamic=false, options.opt_level=1".parse()?;
    let text = compile.region().explain().to_string();
    let want = "step: 0 calls, 0 graphs, 0 breaks, 0 recompiles \
                (mode evaluation, backend inductor, dynamic false, opt_level 1)\n";
    assert_eq!(text, want);
    Ok(())
}

#[test]
fn inputs_have_the_same_numbers_in_guards_and_recompiles() -> Result<()> {
    let region = Compile::new().region();
    let (x, y) = (t(&[1.0]), t(&[2.0]));
    for z in [t(&[1.0]), t(&[1.0, 2.0])] {
        region.run(|| x.exp()?.mul(&y)?.neg()?.add(&z))?;
    }
    let explanation = region.explain();
    assert!(explanation.recompiles[0].to_string().ends_with(": input 2 was [1], now [2]"), "{explanation}");
    assert_eq!(explanation.graphs[1].guards[2].to_string(), "input 2 is f32[2]");
    Ok(())
}

#[test]
fn recompiles_by_grad_mode_say_so() -> Result<()> {
    let w = leaf(&[1.0]);
    let region = Compile::new().region();
    region.run(|| w.exp())?;
    let _guard = no_grad();
    region.run(|| w.exp())?;
    let reason = &region.explain().recompiles[0].reason;
    assert_eq!(reason.to_string(), "gradients were recorded, now they are not recorded");
    Ok(())
}

/// What is new says so in its own words, and what helps where something does.
#[test]
fn recompiles_tell_what_is_new_and_what_helps() -> Result<()> {
    type Body<'a> = &'a dyn Fn() -> Result<Tensor>;
    let (x, wide) = (t(&[1.0, 4.0]), t(&[1.0, 4.0]).to_dtype(DType::F64)?);
    let square = t(&[1.0, 2.0, 3.0, 4.0]).reshape([2, 2])?;
    let turned = square.t()?;
    let (marked, y, pair) = (t(&[1.0, 4.0, 9.0]), t(&[2.0, 3.0]), t(&[1.0, 2.0, 3.0, 4.0]).chunk(2, 0)?);
    marked.mark_dynamic(0, 2..=8)?;
    let w = leaf(&[1.0, 2.0]);
    let cases: [(Body<'_>, Body<'_>, &str, Option<&str>); 12] = [
        (&|| x.exp(), &|| t(&[1.0]).exp(), "input 0 was [2], now [1]", Some("pad to 2")),
        (&|| x.exp(), &|| wide.exp(), "input 0 was f32, now f64", Some("to_dtype")),
        (&|| square.exp(), &|| turned.exp(), "input 0 had strides [2, 1], now [1, 2]", Some("contiguous()")),
        (&|| x.exp(), &|| w.exp(), "input 0 had requires_grad false, now true", None),
        (&|| x.exp(), &|| marked.exp(), "input 0 has different dims marked as dynamic", Some("mark_dynamic")),
        (&|| x.add(&wide), &|| pair[0].add(&pair[1]), "input 1 was f64, now f32", Some("to_dtype")),
        (&|| x.add(&y), &|| pair[0].add(&pair[1]), "input 1 shares its storage differently", Some("clone")),
        (&|| x.exp(), &|| x.neg(), "next came exp, now neg", None),
        (
            &|| square.sum_dim(0, false),
            &|| square.sum_dim(1, false),
            "dims of sum was [0], now [1]",
            Some("takes a tensor"),
        ),
        (&|| x.mul(2.0), &|| x.mul(2), "operand 1 of mul was float, now int", Some("the same way")),
        (
            &|| x.pow(2.0),
            &|| x.pow(2.5),
            "operand 1 of pow is a number that needs different code",
            Some("a tensor"),
        ),
        (&|| x.sub(&square), &|| x.sub(&x), "sub has different operands", None),
    ];
    for (first, second, reason, advice) in cases {
        let region = Compile::new().region();
        region.run(first)?;
        region.run(second)?;
        let explanation = region.explain();
        let [recompile] = explanation.recompiles.as_slice() else { panic!("{reason}: {explanation}") };
        assert_eq!(recompile.reason.to_string(), reason, "{explanation}");
        assert_eq!(recompile.reason.advice().is_some(), advice.is_some(), "{explanation}");
        if let Some(advice) = advice {
            let hint =
                explanation.to_string().lines().find(|line| line.starts_with("  hint: ")).map(String::from);
            assert!(hint.is_some_and(|hint| hint.contains(advice)), "{explanation}");
        }
    }
    Ok(())
}

/// A graph that was met before goes from capture straight to its kernels, and tells the same.
#[test]
fn a_plan_comes_from_the_graph_cache() -> Result<()> {
    let w = leaf(&[0.5, -1.0, 2.0]);
    let run = |cache: bool| -> Result<_> {
        let region = Compile::new().option("graph_cache", cache)?.region();
        let (scores, loss) = region.run(|| {
            let scores = w.sigmoid()?.mul(&w)?;
            let loss = scores.cumsum(0)?.mul(&scores)?.sum()?;
            Ok((scores, loss))
        })?;
        w.set_grad(None);
        loss.backward()?;
        let grad = w.grad().map(|grad| grad.to_vec::<f32>()).transpose()?;
        Ok((scores.to_vec::<f32>()?, grad, region.explain().graphs.remove(0)))
    };
    let without = run(false)?;
    run(true)?;
    let with = run(true)?;
    assert_eq!((&with.0, &with.1), (&without.0, &without.1));
    let stages = |graph: &kiln_dynamo::GraphInfo| -> Vec<&'static str> {
        graph.times().iter().map(|(name, _)| *name).collect()
    };
    if with.2.interpreted.is_none() {
        assert_eq!(stages(&with.2), ["capture", "aot", "graph cache", "inductor", "C compile"]);
        assert!(stages(&without.2).contains(&"prims"));
    }
    assert_eq!(with.2.texts, without.2.texts);
    assert_eq!((&with.2.steps, &with.2.why_not), (&without.2.steps, &without.2.why_not));
    assert_eq!(with.2.fallbacks, without.2.fallbacks);
    assert_eq!((with.2.bytes_saved, with.2.has_backward), (without.2.bytes_saved, true));
    Ok(())
}
