//! The text form of graphs. What is printed here, [`parse`](crate::parse) reads back.
//!
//! ```text
//! graph(%0: f32[4, 3], %1: float) {
//!   %2 = mul(%0, %1) : f32[4, 3]                       ; train.rs:12
//!   %3 = sum(%2) {dims: [1], keepdim: false} : f32[4]
//!   write %0 <- %2
//!   return %3
//! }
//! ```
//!
//! Ops over lists print under their `foreach_…` name, ops that change their first operand with a trailing
//! underscore.

use std::fmt;

use crate::{Class, Graph, Node, Op, Ty};

impl Op {
    /// The name that it has in text, over lists and in place.
    pub fn text_name(&self, over_lists: bool, in_place: bool) -> String {
        let (before, after) = (if over_lists { "foreach_" } else { "" }, if in_place { "_" } else { "" });
        format!("{before}{}{after}", self.row().name)
    }

    /// Its attributes in text, with a space before: ` {dims: [1], keepdim: false}`; nothing if there are none.
    pub fn text_attributes(&self) -> String {
        let attributes = self.attributes();
        if attributes.is_empty() {
            return String::new();
        }
        let texts: Vec<String> = attributes.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        format!(" {{{}}}", texts.join(", "))
    }
}

impl Graph {
    fn fmt_node(&self, f: &mut fmt::Formatter<'_>, node: &Node) -> fmt::Result {
        let mut line = String::from("  ");
        for (i, out) in node.outs.iter().enumerate() {
            line += &format!("{}%{}", if i > 0 { ", " } else { "" }, out.0);
        }
        let over_lists = node.op.row().class == Class::Pointwise
            && node.args.iter().any(|&v| matches!(self.ty(v), Ty::List(_)));
        line += " = ";
        line += &node.op.text_name(over_lists, node.in_place);
        line.push('(');
        for (i, arg) in node.args.iter().enumerate() {
            line += &format!("{}%{}", if i > 0 { ", " } else { "" }, arg.0);
        }
        line.push(')');
        line += &node.op.text_attributes();
        line += " : ";
        for (i, &out) in node.outs.iter().enumerate() {
            line += &format!("{}{}", if i > 0 { ", " } else { "" }, self.ty(out));
        }
        if node.loc.is_known() { writeln!(f, "{line:<72} ; {}", node.loc) } else { writeln!(f, "{line}") }
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("graph(")?;
        // Long input lists (a thousand parameters) get a line each.
        let long = self.inputs.len() > 6;
        for (i, &input) in self.inputs.iter().enumerate() {
            let separator = match (i, long) {
                (0, true) => "\n    ",
                (0, false) => "",
                (_, true) => ",\n    ",
                (_, false) => ", ",
            };
            write!(f, "{separator}%{}: {}", input.0, self.ty(input))?;
        }
        writeln!(f, ") {{")?;
        for node in &self.nodes {
            self.fmt_node(f, node)?;
        }
        for write in &self.writes {
            write!(f, "  write %{} <- %{}", write.target.0, write.value.0)?;
            match write.element {
                Some(element) => writeln!(f, "[{element}]")?,
                None => writeln!(f)?,
            }
        }
        let outputs: Vec<String> = self.outputs.iter().map(|v| format!("%{}", v.0)).collect();
        writeln!(f, "  return{}{}", if outputs.is_empty() { "" } else { " " }, outputs.join(", "))?;
        writeln!(f, "}}")
    }
}
