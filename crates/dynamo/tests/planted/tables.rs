//! A bit of everything else, on tables of numbers: views that are changed, windows of a cache, joins, order, scatters,
//! truth values, integers, conversions, running sums, and a vector that is long enough for threads.

use kiln_tensor::{DType, Result, Tensor, no_grad};

use crate::world::{CPU, Results, numbers, parameter, whole};

/// See the [module](self).
pub struct Tables {
    values: Tensor,
    counts: Tensor,
    limits: Tensor,
    cache: Tensor,
    rows: Tensor,
    place: Tensor,
    picks: Tensor,
    one_pick: Tensor,
    square: Tensor,
    weights: Tensor,
    long: Tensor,
    trail: Tensor,
    /// A square that may come transposed.
    pub turned: Tensor,
    /// The leaf of two backward passes.
    pub slope: Tensor,
}

impl Tables {
    pub fn new() -> Result<Tables> {
        Ok(Tables {
            values: numbers(400, &[33, 12])?,
            counts: whole(401, &[7, 33], 19)?,
            limits: whole(402, &[33], 19)?.to_dtype(DType::F32)?.add(0.5)?,
            cache: numbers(403, &[2, 33, 12])?,
            rows: numbers(404, &[2, 4, 12])?,
            place: Tensor::from_slice(&[20i64, 3])?,
            picks: whole(405, &[7], 33)?,
            one_pick: whole(406, &[33, 1], 12)?,
            square: numbers(407, &[12, 12])?,
            weights: numbers(408, &[12, 12])?,
            long: numbers(409, &[70_000])?,
            trail: numbers(412, &[70_000])?,
            turned: numbers(410, &[5, 5])?,
            slope: parameter(411, &[33, 12], 1.0)?,
        })
    }

    /// What a call changes.
    pub fn state(&self) -> Vec<Tensor> {
        [&self.cache, &self.square, &self.long, &self.trail].into_iter().cloned().collect()
    }

    pub fn all(&self, rate: f64) -> Result<Results> {
        let mut results = Results::new();
        let parts: [fn(&Tables) -> Result<Results>; 7] = [
            Tables::views,
            Tables::windows,
            Tables::order,
            Tables::scatters,
            Tables::conversions,
            Tables::integers,
            Tables::scans,
        ];
        for part in parts {
            results.extend(part(self)?);
        }
        let _guard = no_grad();
        results.extend(self.products()?);
        results.extend(self.long(rate)?);
        results.push(("turned", self.turned.mul(&numbers(5, &[5, 5])?)?.add(rate)?));
        Ok(results)
    }

    /// Views that are read, changed, and read again.
    fn views(&self) -> Result<Results> {
        let base = self.values.mul(2.0)?;
        let top = base.narrow(0, 3, 5)?;
        let before = top.exp()?;
        base.add_(1.0)?;
        let after = top.exp()?;
        base.narrow(0, 10, 4)?.mul_(3.0)?;
        base.narrow(1, 2, 3)?.sub_(&base.narrow(1, 5, 3)?.sin()?)?;
        let columns = base.t()?.narrow(0, 1, 4)?.cos()?;
        let some = self.values.slice(0, 2, 30, 3)?.slice(0, 1, 9, 2)?.mul(3.0)?;
        let thinned = self.values.sigmoid()?.slice(1, 1, 12, 2)?.slice(0, 0, 33, 4)?.add(1.0)?;
        let mirrored = self.values.flip([0])?.sub(&self.values)?.abs()?.roll(3, 0)?;
        let joined = Tensor::cat(
            [
                self.values.narrow(0, 0, 5)?.mul(2.0)?,
                self.values.narrow(0, 7, 9)?.exp()?,
                self.values.narrow(0, 20, 4)?,
            ],
            0,
        )?;
        let turned = self.values.exp()?.permute([1, 0])?.contiguous()?;
        let diagonal = self.square.diagonal(1, 0, 1)?.mul(2.0)?;
        let windows = self.values.unfold(0, 4, 3)?.amax_dim(-1, false)?;
        let tiled = self.values.narrow(0, 0, 3)?.repeat([2, 2])?.tril(1)?;
        Ok(vec![
            ("before", before),
            ("after", after),
            ("base", base),
            ("columns", columns),
            ("some", some),
            ("thinned", thinned),
            ("mirrored", mirrored),
            ("joined", joined),
            ("transposed", turned),
            ("diagonal", diagonal),
            ("windows", windows),
            ("tiled", tiled),
        ])
    }

    /// Rows that go into a cache, and parts that go into what was just computed.
    fn windows(&self) -> Result<Results> {
        let row = self.rows.mul(0.5)?.narrow(1, 0, 2)?;
        self.cache.index_copy_(1, &self.place, &row)?;
        self.cache.narrow(1, 8, 4)?.copy_(&self.rows)?;
        let seen = self.cache.narrow(1, 0, 12)?.matmul(&self.weights)?.softmax(1)?.sum_dim(1, false)?;
        let part = self.values.narrow(0, 0, 3)?.sigmoid()?;
        let whole = self.values.cos()?;
        whole.narrow(0, 4, 3)?.copy_(&part)?;
        let filled = self.values.tanh()?;
        filled.narrow(1, 3, 2)?.fill_(7.0)?;
        let kept = filled.select(0, 5)?.add(1.0)?;
        Ok(vec![("seen", seen), ("whole", whole), ("filled", filled), ("kept", kept)])
    }

    /// Sorting, picking the largest, truth values.
    fn order(&self) -> Result<Results> {
        let scores = self
            .counts
            .to_dtype(DType::F32)?
            .add(&Tensor::arange(0, 33, &CPU)?.to_dtype(DType::F32)?.div(64.0)?)?;
        let (sorted, _) = scores.sort(1, true)?;
        let (upwards, places) = scores.mul(-1.5)?.sort(1, false)?;
        let (best, best_places) = scores.topk(5, 1, true)?;
        let most = self.counts.to_dtype(DType::F32)?.argmax_dim(1, false)?;
        let least = self.counts.to_dtype(DType::F32)?.argmin_dim(1, false)?;
        let middle = scores.median_dim(1, false)?.0;
        let below = self.values.abs()?.neg()?.sub(1.0)?.amax_dim(1, false)?;
        let mask = self.values.gt(0.1)?;
        let chosen = mask.logical_not()?.where_self(&self.values.exp()?, &self.values.sub(3.0)?)?;
        let masked =
            self.values.masked_fill(&mask.logical_and(&self.values.lt(0.5)?)?, -2.0)?.clamp(-1.5, 0.75)?;
        let any = self.values.gt(0.9)?.any_dim(1, false)?.logical_not()?;
        let count = mask.to_dtype(DType::I64)?.sum_dim(1, false)?;
        let length = self.values.norm_dim(2.0, 1, false)?;
        let spread = self.values.var_dim(1, 1, false)?.logsumexp(0, false)?;
        Ok(vec![
            ("sorted", sorted),
            ("upwards", upwards),
            ("places", places),
            ("best", best),
            ("best places", best_places),
            ("most", most),
            ("least", least),
            ("middle", middle),
            ("below", below),
            ("chosen", chosen),
            ("masked", masked),
            ("any", any.to_dtype(DType::F32)?),
            ("count", count),
            ("length", length),
            ("spread", spread),
        ])
    }

    /// Elements that go where an index says, and come from there.
    fn scatters(&self) -> Result<Results> {
        let src = self.values.narrow(0, 0, 7)?;
        let counted = Tensor::ones([33, 12], &CPU)?.index_add(0, &self.picks, &src)?.add(&self.values)?;
        let one = self.values.scatter_add(1, &self.one_pick, &self.values.narrow(1, 0, 1)?.mul(4.0)?)?;
        let picked = self.values.index_select(0, &self.picks)?.mul(2.0)?;
        let gathered = self.values.gather(1, &self.one_pick)?.squeeze(1)?.exp()?;
        let hot = self.picks.one_hot(33)?.to_dtype(DType::F32)?.matmul(&self.values)?;
        Ok(vec![("counted", counted), ("one", one), ("picked", picked), ("gathered", gathered), ("hot", hot)])
    }

    /// From dtype to dtype and back.
    fn conversions(&self) -> Result<Results> {
        let cut = self.values.mul(9.0)?.to_dtype(DType::I64)?.to_dtype(DType::F32)?;
        let rounded = self.values.to_dtype(DType::BF16)?.to_dtype(DType::F32)?.mul(3.0)?;
        let half = self.values.to_dtype(DType::BF16)?.mul(1.5)?.exp()?;
        let wide = self.values.to_dtype(DType::F64)?.sqrt()?.nan_to_num(Some(0.25), None, None)?;
        let difference = self.values.exp()?.add(&self.values.cos()?.neg()?)?;
        let error = self.values.mul(1.25)?.erf()?.add(&self.values.abs()?.pow(1.75)?)?;
        Ok(vec![
            ("cut", cut),
            ("rounded", rounded),
            ("half", half),
            ("wide", wide),
            ("difference", difference),
            ("error", error),
        ])
    }

    /// Whole numbers.
    fn integers(&self) -> Result<Results> {
        let mirrored = self.counts.flip([1])?;
        let difference = self.counts.sub(&mirrored)?;
        let parts = self.counts.floor_divide(4)?.add(&self.counts.remainder(5)?)?;
        let bits = self.counts.bitwise_and(12)?.bitwise_xor(&mirrored)?.bitwise_left_shift(2)?;
        let small = self.counts.lt(&self.limits)?.to_dtype(DType::I64)?;
        let capped = self.counts.sub(7)?.relu6()?;
        let bytes = self.counts.mul(40)?.to_dtype(DType::U8)?.add(3)?;
        let total = difference.abs()?.amax_dim(0, false)?.sub(&small.sum_dim(0, false)?)?;
        Ok(vec![
            ("difference", difference),
            ("parts", parts),
            ("bits", bits),
            ("small", small),
            ("capped", capped),
            ("bytes", bytes),
            ("total", total),
        ])
    }

    /// Running sums and products, and two backward passes that meet in one leaf.
    fn scans(&self) -> Result<Results> {
        let running = self.values.cumsum(0)?.mul(0.5)?;
        let along = self.values.exp()?.cumsum(1)?;
        let product = self.values.mul(0.1)?.add(1.0)?.cumprod(0)?;
        self.slope.mul(&self.values)?.cumsum(0)?.mul(&self.values.sin()?)?.sum()?.backward()?;
        self.slope.pow(2.0)?.mul(0.5)?.sum()?.backward()?;
        Ok(vec![("running", running), ("along", along), ("product", product)])
    }

    /// Products, of which some read what is then changed.
    fn products(&self) -> Result<Results> {
        let product = self.square.mm(&self.weights)?;
        let upside_down = self.square.mm(&self.weights.add(1.0)?)?.flip([0])?.mul(2.0)?;
        let turned = self.square.t()?.mm(&self.weights.t()?)?.relu()?;
        self.square.add_(0.25)?;
        Ok(vec![("product", product), ("upside down", upside_down), ("turned product", turned)])
    }

    /// Long enough for chunks and threads.
    fn long(&self, rate: f64) -> Result<Results> {
        self.long.mul_(0.9)?.add_(rate)?;
        self.trail.mul_(0.5)?.sub_(rate)?;
        let sum = self.long.mul(&self.long)?.sum()?;
        let mean = self.long.mul(2.0)?.exp()?.mean()?;
        let waves = self.long.sin()?.add(&self.long.mul(3.0)?)?;
        Ok(vec![("sum", sum), ("mean", mean), ("waves", waves)])
    }
}
