//! Lists that come again: whatever changed under them between two calls, compiled results are eager's.

use kiln_dynamo::{Backend, Compile, Region};
use kiln_tensor::{DType, Device, Error, Result, Tensor, TensorList, foreach, no_grad};

/// The tensors of a program, and the lists it is called with.
struct World {
    tensors: Vec<Tensor>,
    lists: Vec<TensorList>,
}

impl World {
    fn new(tensors: Vec<Tensor>, lists: &[&[usize]]) -> World {
        let list = |members: &&[usize]| members.iter().map(|&i| tensors[i].clone()).collect();
        World { lists: lists.iter().map(list).collect(), tensors }
    }

    fn values(&self) -> Result<Vec<Vec<f64>>> {
        self.tensors.iter().map(|t| t.to_vec_cast::<f64>()).collect()
    }
}

/// `count` tensors of three elements, all different.
fn tensors(count: usize) -> Result<Vec<Tensor>> {
    (0..count).map(|i| Tensor::from_slice(&[0.5 + i as f32, 1.5 - i as f32, 0.25])).collect()
}

fn regions() -> Vec<(Backend, Region)> {
    Backend::ALL.iter().map(|&b| (b, Compile::new().backend(b).region())).collect()
}

/// Calls `body` eagerly and in one region of each backend, once per step, in worlds made alike; before each call
/// the step changes the world and says which of its lists are used. All tensors must agree after each call.
fn check(
    make: impl Fn() -> Result<World>,
    steps: &[&dyn Fn(&World) -> Result<usize>],
    body: impl Fn(&World, &TensorList) -> Result<()>,
) -> Result<Vec<(Backend, Region)>> {
    let eager = make()?;
    let mut want = Vec::new();
    for step in steps {
        let list = step(&eager)?;
        let outcome = body(&eager, &eager.lists[list]).map_err(|e| e.to_string());
        want.push((eager.values()?, outcome.is_ok()));
    }
    let regions = regions();
    for (backend, region) in &regions {
        let world = make()?;
        for (call, (step, (want, succeeds))) in steps.iter().zip(&want).enumerate() {
            let list = step(&world)?;
            let outcome = region.run(|| body(&world, &world.lists[list]));
            assert_eq!(outcome.is_ok(), *succeeds, "{backend}, call {call}: {outcome:?}");
            assert_eq!(&world.values()?, want, "{backend}, call {call}\n{}", region.explain());
        }
    }
    Ok(regions)
}

fn same(_: &World) -> Result<usize> {
    Ok(0)
}

fn double(_: &World, list: &TensorList) -> Result<()> {
    let _guard = no_grad();
    foreach::mul_(list, 2.0)?;
    foreach::add_(list, 1.0)
}

#[test]
fn members_changed_in_place() -> Result<()> {
    let change = |world: &World| {
        world.tensors[1].add_(10.0)?;
        Ok(0)
    };
    let regions =
        check(|| Ok(World::new(tensors(3)?, &[&[0, 1, 2]])), &[&same, &same, &change, &same], double)?;
    for (_, region) in regions {
        assert!(region.explain().recompiles.is_empty(), "{}", region.explain());
    }
    Ok(())
}

#[test]
fn members_that_begin_and_cease_to_want_gradients() -> Result<()> {
    let on = |world: &World| world.tensors[1].requires_grad_(true).map(|_| 0);
    let off = |world: &World| world.tensors[1].requires_grad_(false).map(|_| 0);
    let steps: &[&dyn Fn(&World) -> Result<usize>] = &[&same, &same, &on, &same, &off, &same];
    check(|| Ok(World::new(tensors(3)?, &[&[0, 1, 2]])), steps, double)?;
    // With gradients recorded, a leaf that wants one can't be changed: the error is eager's.
    let recorded = |_: &World, list: &TensorList| foreach::mul_(list, 2.0);
    check(|| Ok(World::new(tensors(3)?, &[&[0, 1, 2]])), steps, recorded)?;
    Ok(())
}

#[test]
fn members_with_a_history() -> Result<()> {
    let make = || {
        let leaves = tensors(2)?;
        leaves.iter().try_for_each(|t| t.requires_grad_(true).map(drop))?;
        let computed = leaves.iter().map(|t| t.mul(3.0)).collect::<Result<Vec<_>>>()?;
        assert!(leaves[0].is_leaf() && !computed[0].is_leaf() && computed[0].detach()?.is_leaf());
        Ok(World::new(leaves.into_iter().chain(computed).collect(), &[&[0, 1], &[2, 3]]))
    };
    let read = |world: &World, list: &TensorList| {
        let _guard = no_grad();
        let sums = foreach::add(list, 1.0)?;
        world.tensors[0].copy_(&sums.get(1)?)?;
        Ok(())
    };
    let other = |_: &World| Ok(1);
    check(make, &[&same, &same, &other, &other, &same], read)?;
    Ok(())
}

#[test]
fn other_lists_of_equal_and_of_different_members() -> Result<()> {
    let make = || {
        let mut all = tensors(6)?;
        all.push(Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0])?);
        all.push(Tensor::from_slice(&[1.0f64, 2.0, 3.0])?);
        all.push(Tensor::arange(0, 6, &Device::Cpu)?.to_dtype(DType::F32)?.reshape([2, 3])?);
        all.push(Tensor::arange(0, 6, &Device::Cpu)?.to_dtype(DType::F32)?.reshape([3, 2])?.t()?);
        let lists: &[&[usize]] = &[&[0, 1, 2], &[3, 4, 5], &[0, 6, 2], &[0, 7, 2], &[0, 1], &[8, 9]];
        Ok(World::new(all, lists))
    };
    let list = |i: usize| move |_: &World| Ok(i);
    let (other, shape, dtype, short, strided) = (list(1), list(2), list(3), list(4), list(5));
    check(
        make,
        &[
            &same, &same, &other, &same, &shape, &shape, &dtype, &dtype, &short, &short, &strided, &strided,
            &same,
        ],
        double,
    )?;
    Ok(())
}

#[test]
fn members_that_share_memory() -> Result<()> {
    // A tensor that is there twice, and one that is a view of another.
    let make = || {
        let mut all = tensors(3)?;
        all.push(all[0].slice(0, 0, 3, 1)?);
        Ok(World::new(all, &[&[0, 1, 2], &[0, 1, 0], &[0, 1, 3]]))
    };
    let twice = |_: &World| Ok(1);
    let view = |_: &World| Ok(2);
    check(make, &[&same, &same, &twice, &same, &view, &view, &same], double)?;
    Ok(())
}

#[test]
fn members_used_alone_and_in_another_list() -> Result<()> {
    let make = || {
        let mut all = tensors(4)?;
        all.push(all[0].slice(0, 0, 2, 1)?);
        Ok(World::new(all, &[&[0, 1, 2], &[2, 1]]))
    };
    let steps: &[&dyn Fn(&World) -> Result<usize>] = &[&same, &same, &same];
    // After the list, before it, through another list, and through a view of their memory.
    check(make, steps, |world, list| {
        double(world, list)?;
        world.tensors[1].mul_(&world.tensors[0])?;
        world.tensors[3].copy_(&world.tensors[2].add(&world.tensors[1])?)?;
        Ok(())
    })?;
    check(make, steps, |world, list| {
        world.tensors[1].mul_(3.0)?;
        double(world, list)
    })?;
    check(make, steps, |world, list| {
        double(world, list)?;
        double(world, &world.lists[1])
    })?;
    check(make, steps, |world, list| {
        double(world, list)?;
        world.tensors[4].add_(5.0)?;
        double(world, list)
    })?;
    check(make, steps, |world, list| {
        double(world, list)?;
        let first = world.tensors[0].to_vec::<f32>()?[0];
        world.tensors[3].add_(f64::from(first))?;
        double(world, list)
    })?;
    Ok(())
}

#[test]
fn calls_that_end_early() -> Result<()> {
    let fails = |world: &World, list: &TensorList| {
        double(world, list)?;
        world.tensors[0].add(&Tensor::from_slice(&[1.0f32; 7])?).map(drop)
    };
    check(|| Ok(World::new(tensors(3)?, &[&[0, 1, 2]])), &[&same, &same, &same], fails)?;
    Ok(())
}

#[test]
fn changes_are_counted() -> Result<()> {
    for (backend, region) in regions() {
        let x = Tensor::from_slice(&[1.0f32, 2.0])?;
        x.requires_grad_(true)?;
        let list = TensorList::new(vec![x.clone(), Tensor::from_slice(&[3.0f32])?]);
        for _ in 0..3 {
            let loss = x.mul(&x)?.sum()?;
            region.run(|| {
                let _guard = no_grad();
                foreach::mul_(&list, 0.5)
            })?;
            let error = loss.backward().expect_err("what backward needs was changed");
            assert!(matches!(error, Error::Op(_)), "{backend}: {error}");
        }
        assert_eq!(x.to_vec::<f32>()?, [0.125, 0.25], "{backend}");
    }
    Ok(())
}
