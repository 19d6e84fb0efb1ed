//! Elements of lists that are there to be written back: a table puts them straight into their inputs, and no
//! node takes them out of their list. All others are taken out by a `list_get`.

use std::borrow::Cow;

use kiln_ir::{Graph, Loc, Op, Value, Write};
use rustc_hash::FxHashMap;

/// Nobody writes the element back.
const FREE: u32 = u32::MAX;
/// It is needed for more than one write-back.
const SHARED: u32 = u32::MAX - 1;

/// For every list whose elements are needed, by row, the write-back that needs each.
#[derive(Clone, Default)]
pub(crate) struct Elements(FxHashMap<Value, Vec<u32>>);

impl Elements {
    pub fn of(graph: &Graph) -> Elements {
        let mut elements = Elements::default();
        for (w, write) in graph.writes.iter().enumerate() {
            if let Some(row) = write.element {
                let state = elements.state(graph, write.value, row as usize);
                *state = if *state == FREE { w as u32 } else { SHARED };
            }
        }
        for node in &graph.nodes {
            if let Op::ListGet { index } = node.op {
                *elements.state(graph, node.args[0], index) = SHARED;
            }
        }
        elements
    }

    fn state(&mut self, graph: &Graph, list: Value, row: usize) -> &mut u32 {
        let len = || graph.ty(list).as_list().map_or(0, |items| items.len());
        &mut self.0.entry(list).or_insert_with(|| vec![FREE; len()])[row]
    }

    /// Per row of a list, see [`Elements::write`].
    pub fn rows(&self, list: Value) -> &[u32] {
        self.0.get(&list).map_or(&[], |rows| rows)
    }

    /// The write-back that is all that an element is for, by the list's [`rows`](Elements::rows).
    pub fn write(rows: &[u32], row: usize) -> Option<usize> {
        rows.get(row).filter(|&&w| w < SHARED).map(|&w| w as usize)
    }

    /// Whether an element is needed for more than one write-back.
    pub fn is_shared(&self, list: Value, row: usize) -> bool {
        self.rows(list).get(row) == Some(&SHARED)
    }
}

/// Takes elements that are needed for more than a write-back out of their lists, each once.
pub(crate) fn take_out(graph: Cow<'_, Graph>) -> (Cow<'_, Graph>, Elements) {
    let elements = Elements::of(&graph);
    let is_pack = |graph: &Graph, v: Value| graph.producer(v).is_some_and(|n| matches!(n.op, Op::List {}));
    let stays = |write: &Write| {
        write
            .element
            .is_none_or(|row| !elements.is_shared(write.value, row as usize) && !is_pack(&graph, write.value))
    };
    if graph.writes.iter().all(stays) {
        return (graph, elements);
    }
    let moved: Vec<usize> = (0..graph.writes.len()).filter(|&w| !stays(&graph.writes[w])).collect();
    let mut graph = graph.into_owned();
    let mut taken: FxHashMap<(Value, usize), Value> = FxHashMap::default();
    for node in &graph.nodes {
        if let Op::ListGet { index } = node.op {
            taken.insert((node.args[0], index), node.outs[0]);
        }
    }
    for w in moved {
        let Write { target, value: list, element } = graph.writes[w];
        let index = element.unwrap_or(0) as usize;
        let packed = graph.producer(list).filter(|n| matches!(n.op, Op::List {})).map(|n| n.args[index]);
        let value = packed.unwrap_or_else(|| {
            *taken.entry((list, index)).or_insert_with(|| {
                let ty = graph.ty(target).clone();
                graph.push(Op::ListGet { index }, &[list], [ty], false, Loc::UNKNOWN)[0]
            })
        });
        graph.writes[w] = Write::whole(target, value);
    }
    let elements = Elements::of(&graph);
    (Cow::Owned(graph), elements)
}
