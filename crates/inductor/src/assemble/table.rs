//! Steps of lists: one kernel over a table of pointers, a row for each of the list's tensors.

use kiln_ir::{Def, Value};
use kiln_plan::{BufferId, BufferRef, Launch, Step, ViewRef};

use super::Assembler;
use super::eager::{Cone, Of};
use crate::fuse::table::TableKernel;
use crate::fuse::{Fusion, Target};
use crate::rewrite::elements::Elements;

/// A column of a table: where each row's pointer comes from.
enum Column<'a> {
    /// The elements of a packed list.
    Packed(&'a [Value]),
    /// The rows of a list that the table makes, and their write-backs.
    Root { list: Value, writes: &'a [u32] },
}

impl<'a> Column<'a> {
    fn of(fusion: &'a Fusion<'_>, table: usize, lowered: &TableKernel, column: usize) -> Column<'a> {
        match lowered.packs.get(column) {
            Some(&pack) => Column::Packed(fusion.graph.producer(pack).map_or(&[], |node| &node.args)),
            None => {
                let list = fusion.tables[table].roots[column - lowered.packs.len()];
                Column::Root { list, writes: fusion.elements.rows(list) }
            }
        }
    }
}

impl Assembler<'_, '_> {
    pub(super) fn table(&mut self, t: usize) {
        let fusion = self.fusion;
        let graph = fusion.graph;
        let table = &fusion.tables[t];
        for lowered in table.lower(graph) {
            let mut kernel = lowered.kernel.clone();
            let (columns, scalars) = kernel.prune();
            let source = self.options.target.emit(&kernel);
            let ops = self.ops(&lowered.nodes);
            if self.is_refused(&source) && self.eager_rows(t, &lowered, &ops) {
                continue;
            }
            let (name, number) = (source.name.clone(), self.number(&kernel, source));
            let mut bufs = Vec::with_capacity(lowered.rows.len() * columns.len());
            let (mut bytes_read, mut bytes_written) = (0, 0);
            let mut rows = Vec::with_capacity(lowered.rows.len());
            let columns: Vec<Column<'_>> =
                columns.iter().map(|&c| Column::of(fusion, t, &lowered, c)).collect();
            let sizes: Vec<usize> = kernel.buffers.iter().map(|dtype| dtype.size()).collect();
            for &row in &lowered.rows {
                let count = table.count(row) as i64;
                for (column, size) in columns.iter().zip(&sizes) {
                    match column {
                        Column::Packed(elements) => {
                            bufs.push(self.packed(elements[row]));
                            bytes_read += count as usize * size;
                        }
                        Column::Root { list, writes } => {
                            let buffer = self.row(*list, writes, row);
                            bufs.push(BufferRef { buffer, offset: 0 });
                            bytes_written += count as usize * size;
                        }
                    }
                }
                rows.push(count);
            }
            let scalars = scalars.iter().map(|&s| self.scalar(lowered.scalars[s])).collect();
            let (numbers, checks) = (kernel.numbers(), Vec::new());
            let launch = Launch { kernel: number, numbers, bufs, rows, scalars, checks, coarser: 1 };
            self.step(Step::Launch(launch), &name, ops, bytes_read, bytes_written);
        }
    }

    /// Steps that run a table's ops one by one, row after row. False if there are no such steps.
    fn eager_rows(&mut self, t: usize, lowered: &TableKernel, ops: &[String]) -> bool {
        let fusion = self.fusion;
        let roots = &fusion.tables[t].roots;
        let row_is_possible = |&row: &usize| Cone::new(fusion, roots, Of::Row(row)).is_ok();
        if !lowered.rows.iter().all(row_is_possible) {
            return false;
        }
        for &row in &lowered.rows {
            let mut outs = Vec::new();
            for (r, &list) in roots.iter().enumerate() {
                let buffer = self.row(list, fusion.elements.rows(list), row);
                let there = self.buffers[buffer.index()].ty.clone();
                let items = fusion.graph.ty(list).as_list();
                let Some(ty) = items.and_then(|items| items.get(row)).cloned() else { continue };
                // Behind a reshape: only dense targets get there.
                let strides = if there.shape == ty.shape {
                    there.strides.clone()
                } else {
                    ty.shape.contiguous_strides()
                };
                outs.push((r, ViewRef { at: BufferRef { buffer, offset: 0 }, ty, strides }));
            }
            let bytes: usize = outs.iter().map(|(_, out)| self.buffers[out.at.buffer.index()].ty.bytes).sum();
            self.eager(roots, Of::Row(row), outs, ops.to_vec(), (bytes, bytes));
        }
        true
    }

    /// Where a table reads an element of a packed list.
    pub(super) fn packed(&mut self, element: Value) -> BufferRef {
        if let Def::Input(number) = self.fusion.graph.def(element)
            && let Some(buffer) = self.inputs[number as usize]
        {
            return BufferRef { buffer, offset: 0 };
        }
        let view = self.fusion.element(element);
        BufferRef { buffer: self.home(view.base), offset: view.offset }
    }

    /// Where a table puts a row of a list; `writes` are the list's [`Elements::rows`].
    fn row(&mut self, list: Value, writes: &[u32], row: usize) -> BufferId {
        if let Some(write) = Elements::write(writes, row) {
            if let Some(direct) = self.direct(write) {
                return direct;
            }
            if let Some(input) = self.input_of(write) {
                let ty = self.tensor(self.fusion.graph.writes[write].target);
                let waiting = self.arena_like(&ty, input);
                self.copies.push((waiting, input));
                return waiting;
            }
        }
        match self.list_gets.get(&(list, row)).copied() {
            Some(value) => self.list_home(value),
            None => {
                let ty = self.fusion.graph.list_of(list)[row].clone();
                self.arena(&ty)
            }
        }
    }

    /// Where a table puts an element; a write-back that can't go straight there is copied at the end.
    fn list_home(&mut self, value: Value) -> BufferId {
        let home = self.home(value);
        if let Some(t) = self.fusion.library_target(value)
            && let Target::Write(w) = self.fusion.targets[&value][t]
            && self.order.late.contains(&w)
            && let Some(id) = self.input_of(w)
        {
            self.copies.push((home, id));
        }
        home
    }
}
