//! Golden files of functionalisation, the joint graph and its partition.
//!
//! - `; test functionalise`: a trace (its text is described in `src/text.rs`) becomes a graph, its results and write-backs.
//! - `; test joint`: gradients flow from every float result to every float input, except class numbers and inputs named in
//!   a `; data %n` line. With `parts`, every result is a part of its own.
//! - `; test partition` (`parts`): the joint graph in prims, cut in two.

use kiln_aot::trace::Variable;
use kiln_aot::{Functional, Home, Joint, Recording, View, functionalise, joint, partition};
use kiln_ir::Graph;
use kiln_testkit::golden;

fn functional(text: &str) -> Result<String, String> {
    let (recording, names) = Recording::named(text).map_err(|e| e.to_string())?;
    if let Err(changed) = recording.trace.check() {
        return Err(format!("{} changes an input through which gradients flow", changed.op));
    }
    let functional = functionalise(&recording.trace, &recording.live).map_err(|e| e.to_string())?;
    functional.graph.verify(kiln_ir::Stage::Functional, "functionalise").map_err(|e| e.to_string())?;
    Ok(format!("{}{}", functional.graph, survivors(&names, &functional)))
}

/// What outlives a trace: where its memory is, and what it is to autograd.
fn survivors(names: &[String], functional: &Functional) -> String {
    let name = |variable: Variable| &names[variable as usize];
    let mut text = String::new();
    for survivor in &functional.survivors {
        let homes = survivor.homes.iter().map(|(home, layout)| {
            let home = match home {
                Home::Output(output) => format!("output {output}"),
                Home::Input(input) => format!("memory of {}", name(*input)),
            };
            let strides: Vec<String> = layout.strides.iter().map(isize::to_string).collect();
            format!("{home} {} by [{}] at {}", layout.shape, strides.join(", "), layout.offset)
        });
        let notes = [
            (survivor.requires_grad, "on the tape"),
            (survivor.used_up, "used up"),
            (survivor.twice, "through a pass"),
            (survivor.view == View::Unrecorded, "a view that was not recorded"),
        ];
        let homes: Vec<String> = homes.collect();
        text += &format!("{}: {}", name(survivor.variable), homes.join("; "));
        for (_, note) in notes.iter().filter(|(holds, _)| *holds) {
            text += &format!(", {note}");
        }
        if let View::Of(base) = survivor.view {
            text += &format!(", a view of {}", name(base));
        }
        text += "\n";
    }
    text
}

fn joint_of(text: &str, in_parts: bool) -> kiln_ir::Result<Joint> {
    let graph: Graph = text.parse()?;
    let data: Vec<usize> = text
        .lines()
        .filter_map(|line| line.strip_prefix("; data %"))
        .filter_map(|n| n.trim().parse().ok())
        .collect();
    let carries = |v: &kiln_ir::Value| kiln_ir::carries_gradient(graph.ty(*v));
    let outputs: Vec<usize> = (0..graph.outputs.len()).filter(|&i| carries(&graph.outputs[i])).collect();
    let inputs: Vec<usize> =
        (0..graph.inputs.len()).filter(|&i| carries(&graph.inputs[i]) && !data.contains(&i)).collect();
    let parts: Vec<&[usize]> = if in_parts { outputs.chunks(1).collect() } else { vec![&outputs] };
    joint(&graph, &parts, &inputs, &|_| true)
}

/// Which results are which gradients, if the backward has several parts.
fn gradients(joint: &Joint) -> String {
    let place = |grad: &Option<usize>| grad.map_or("none".to_string(), |result| format!("result {result}"));
    let told = |(number, part): (usize, &kiln_aot::Part)| {
        format!("part {number}: {}\n", part.grads.iter().map(place).collect::<Vec<_>>().join(", "))
    };
    if joint.parts.len() > 1 { joint.parts.iter().enumerate().map(told).collect() } else { String::new() }
}

#[test]
fn golden() {
    let stage = |header: &str, text: &str| -> Result<String, String> {
        let (name, in_parts) = match header.strip_suffix(" parts") {
            Some(name) => (name, true),
            None => (header, false),
        };
        match name {
            "functionalise" => functional(text),
            "joint" => {
                let joint = joint_of(text, in_parts).map_err(|e| e.to_string())?;
                Ok(format!("{}{}", joint.graph, gradients(&joint)))
            }
            "partition" => {
                let joint = joint_of(text, in_parts).and_then(|joint| joint.map(kiln_prims::lower));
                let parts = joint.and_then(|joint| partition(&joint)).map_err(|e| e.to_string())?;
                let mut shown = format!("forward {}", parts.forward);
                for backward in &parts.backward {
                    let saved = backward.saved.iter().map(|s| format!("{:?}: {}", s.what, s.ty));
                    let saved = saved.collect::<Vec<_>>().join(", ");
                    shown += &format!("saved {saved}\nbackward {}", backward.graph);
                }
                Ok(format!("{shown}{:?}\n", parts.report))
            }
            _ => Err(format!("there is no stage `{name}`")),
        }
    };
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    golden::run(dir, stage).unwrap_or_else(|e| panic!("{e}"));
}
