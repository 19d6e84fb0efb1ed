//! The body of a scan: a functional graph that is an attribute of an op.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use rustc_hash::FxHashMap;

use crate::{Attribute, Graph, Loc, Stage};

/// A functional graph, the same object wherever it is equal: recordings, guards and caches compare it as they compare
/// a number. It knows no lines, which differ between calls that do the same.
#[derive(Clone)]
pub struct Body(Arc<Known>);

struct Known {
    graph: Graph,
    text: String,
}

static KNOWN: LazyLock<Mutex<FxHashMap<String, Weak<Known>>>> = LazyLock::new(Mutex::default);

impl Body {
    /// The body that this graph is.
    pub fn new(graph: Graph) -> Body {
        let mut graph = graph.into_canonical();
        graph.nodes.iter_mut().for_each(|node| node.loc = Loc::UNKNOWN);
        let lines = graph.to_string();
        let text = quoted(&lines.split_whitespace().collect::<Vec<_>>().join(" "));
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(body) = known.get(&text).and_then(Weak::upgrade) {
            return Body(body);
        }
        // Bodies that nobody has any more go whenever the table would grow.
        if known.len() == known.capacity() {
            known.retain(|_, body| body.strong_count() > 0);
        }
        let body = Arc::new(Known { graph, text: text.clone() });
        known.insert(text, Arc::downgrade(&body));
        Body(body)
    }

    /// A number that no other body has while this one lives.
    pub fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

impl Deref for Body {
    type Target = Graph;

    fn deref(&self) -> &Graph {
        &self.0.graph
    }
}

impl PartialEq for Body {
    fn eq(&self, other: &Body) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

impl Attribute for Body {
    fn print(&self) -> String {
        self.0.text.clone()
    }

    fn parse(text: &str) -> Option<Body> {
        let graph: Graph = unquoted(text)?.parse().ok()?;
        let is_functional = graph.writes.is_empty() && graph.verify(Stage::Functional, "parse").is_ok();
        is_functional.then(|| Body::new(graph))
    }
}

/// A text as an attribute's value: between quotes, with those inside it escaped.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

fn unquoted(text: &str) -> Option<String> {
    let inner = &text[1..quoted_end(text)? - 1];
    let mut characters = inner.chars();
    let mut plain = String::with_capacity(inner.len());
    while let Some(c) = characters.next() {
        plain.push(if c == '\\' { characters.next()? } else { c });
    }
    Some(plain)
}

/// Where a quoted value that a text begins with ends.
pub fn quoted_end(text: &str) -> Option<usize> {
    let mut escaped = false;
    let end = text.strip_prefix('"')?.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    })?;
    Some(end + 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Op;

    const STEP: &str = "graph(%0: f32[3], %1: f32[3]) {
  %2 = add(%0, %1) : f32[3]
  return %2, %2
}
";

    #[test]
    fn equal_graphs_are_one_body() {
        let body = || Body::new(STEP.parse().expect("a graph"));
        let one = body();
        assert_eq!(one, body());
        assert_eq!(Body::parse(&one.print()), Some(one.clone()));
        assert_eq!(one.to_string(), STEP);
        let other = STEP.replace("add", "sub").parse().expect("a graph");
        assert_ne!(one, Body::new(other));
    }

    #[test]
    fn what_is_no_functional_graph_is_no_body() {
        for text in ["graph() { return }", "\"graph() { return", "\"no graph\"", "\"\\"] {
            assert_eq!(Body::parse(text), None, "{text}");
        }
        let changes = quoted("graph(%0: f32[3]) { %1 = neg_(%0) : f32[3] return %1 }");
        assert_eq!(Body::parse(&changes), None);
    }

    #[test]
    fn a_scan_in_a_scan_survives_a_round_trip() -> crate::Result<()> {
        let op = |body: Body| Op::Scan {
            body,
            carries: 1,
            inputs: 1,
            length: 5,
            dtype: crate::DType::F32,
            saves: false,
            order: crate::Order::Forward,
        };
        let inner = op(Body::new(STEP.parse()?));
        let text = format!(
            "graph(%0: f32[3], %1: f32[5, 3]) {{
  %2 = scan(%0, %1){} : f32[18]
  %3 = slice(%2) {{dim: 0, start: 0, end: 3, step: 1}} : f32[3]
  return %3, %3
}}
",
            inner.text_attributes()
        );
        let graph: Graph = text.parse()?;
        assert_eq!(graph.to_string(), text);
        let outer = op(Body::new(graph));
        let (again, _) = Op::from_text("scan", &outer.text_attributes())?;
        assert_eq!(again, outer);
        Ok(())
    }
}
