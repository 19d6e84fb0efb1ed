//! Learning by trying: value functions, policies, replay, search.

use kiln::Result;
use kiln::prelude::*;

use super::{CPU, classifier, programs};
use crate::{Record, Step};

programs!("reinforcement":
    deep_q_network, policy_gradient, actor_critic, proximal_policy, soft_actor, bandit, value_iteration,
    evolution_strategies,
);

/// A replay buffer written in place, a target network that is renewed now and then, actions chosen by the host.
fn deep_q_network(step: &Step) -> Result<Record> {
    let (online, target) = (classifier(3, 16, 2)?, classifier(3, 16, 2)?);
    target.requires_grad_(false)?;
    let optimizer = optim::Adam::new(online.parameters(), 0.01)?;
    let (states, nexts) = (Tensor::zeros([16, 3], &CPU)?, Tensor::zeros([16, 3], &CPU)?);
    let (actions, rewards) = (Tensor::full_of([16], 0, DType::I64, &CPU)?, Tensor::zeros([16], &CPU)?);
    let act = step.another("act");
    let (mut state, mut record) = (Tensor::randn([3], &CPU)?, Record::new());
    for i in 0..12 {
        let action = act.run(|| {
            let _guard = no_grad();
            online.forward(&state)?.argmax()
        })?;
        let action = if i % 4 == 0 { (i / 4 % 2) as i64 } else { action.item::<i64>()? };
        let next = (state.roll(1, 0)? * 0.9 + (action as f64 - 0.5)).ok()?;
        states.i(i)?.copy_(&state)?;
        nexts.i(i)?.copy_(&next)?;
        actions.set_i(i, action)?;
        rewards.i(i)?.copy_(&next.sum()?.neg()?.tanh()?)?;
        state = next;
        if i < 7 {
            continue;
        }
        let picked = Tensor::randint(0, i as i64 + 1, [6], &CPU)?;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let chosen = actions.index_select(0, &picked)?.unsqueeze(1)?;
            let value = online.forward(&states.index_select(0, &picked)?)?.gather(1, &chosen)?.squeeze(1)?;
            let best = target.forward(&nexts.index_select(0, &picked)?)?.amax_dim(1, false)?;
            let wanted = (rewards.index_select(0, &picked)? + best * 0.9).ok()?.detach()?;
            let loss = value.huber_loss(&wanted, 1.0, Reduction::Mean)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
        if i % 3 == 0 {
            let _guard = no_grad();
            for (old, new) in target.parameters().iter().zip(online.parameters()) {
                old.copy_(&new)?;
            }
        }
    }
    record.tensors("online", &online.parameters())?;
    Ok(record)
}

/// REINFORCE with a baseline; episodes have different lengths, actions are drawn in the step.
fn policy_gradient(step: &Step) -> Result<Record> {
    let policy = classifier(3, 12, 3)?;
    let optimizer = optim::Adam::new(policy.parameters(), 0.02)?;
    let mut record = Record::new();
    for length in [4, 6, 4, 6, 6] {
        let states = Tensor::randn([length, 3], &CPU)?;
        let (loss, total) = step.run(|| {
            optimizer.zero_grad();
            let log_shares = policy.forward(&states)?.log_softmax(1)?;
            let noise = log_shares.detach()?.rand_like()?.clamp_min(1e-6)?.log()?.neg()?.log()?;
            let action = (log_shares.detach()? - noise).ok()?.argmax_dim(1, true)?;
            let rewards = states.gather(1, &action)?.squeeze(1)?;
            let returns = rewards.flip(0)?.cumsum(0)?.flip(0)?;
            let advantage = ((&returns - returns.mean()?) / (returns.std()? + 1e-6)).ok()?;
            let chosen = log_shares.gather(1, &action)?.squeeze(1)?;
            let loss = (-(chosen * advantage)).ok()?.mean()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>((loss, rewards.sum()?))
        })?;
        record.tensors("loss and reward", [&loss, &total])?;
    }
    record.tensors("policy", &policy.parameters())?;
    Ok(record)
}

/// Values and actions from one body; advantages by a loop backwards over time.
fn actor_critic(step: &Step) -> Result<Record> {
    let (body, actor, critic) = (nn::Linear::new(4, 16)?, nn::Linear::new(16, 2)?, nn::Linear::new(16, 1)?);
    let parameters = [body.parameters(), actor.parameters(), critic.parameters()].concat();
    let optimizer = optim::Adam::new(parameters.clone(), 0.01)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let (states, rewards) = (Tensor::randn([7, 4], &CPU)?, Tensor::randn([6], &CPU)?);
        let actions = Tensor::randint(0, 2, [6, 1], &CPU)?;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let h = body.forward(&states)?.tanh()?;
            let values = critic.forward(&h)?.squeeze(1)?;
            let fixed = values.detach()?;
            let mut advantages = vec![Tensor::zeros((), &CPU)?; 6];
            let mut last = Tensor::zeros((), &CPU)?;
            for time in (0..6).rev() {
                let error = rewards.i(time)? + fixed.i(time + 1)? * 0.95 - fixed.i(time)?;
                last = (error + last * (0.95 * 0.9)).ok()?;
                advantages[time] = last.clone();
            }
            let advantages = Tensor::stack(&advantages, 0)?;
            let log_shares = actor.forward(&h.i(..6)?)?.log_softmax(1)?;
            let chosen = log_shares.gather(1, &actions)?.squeeze(1)?;
            let entropy = (log_shares.exp()? * &log_shares).ok()?.sum_dim(1, false)?.mean()?;
            let wanted = (&advantages + fixed.i(..6)?).ok()?;
            let value_loss = values.i(..6)?.mse_loss(&wanted, Reduction::Mean)?;
            let loss = (-(chosen * advantages).mean() + value_loss * 0.5 + entropy * 0.01).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &parameters)?;
    Ok(record)
}

/// Several passes over one batch, ended early if the policy has moved too far.
fn proximal_policy(step: &Step) -> Result<Record> {
    let policy = classifier(4, 16, 3)?;
    let optimizer = optim::Adam::new(policy.parameters(), 0.05)?;
    let (states, actions) = (Tensor::randn([12, 4], &CPU)?, Tensor::randint(0, 3, [12, 1], &CPU)?);
    let advantages = Tensor::randn([12], &CPU)?;
    let old = {
        let _guard = no_grad();
        policy.forward(&states)?.log_softmax(1)?.gather(1, &actions)?.squeeze(1)?
    };
    let (mut record, mut passes) = (Record::new(), 0);
    for _ in 0..10 {
        let (loss, moved) = step.run(|| {
            optimizer.zero_grad();
            let new = policy.forward(&states)?.log_softmax(1)?.gather(1, &actions)?.squeeze(1)?;
            let ratio = (&new - &old).exp().ok()?;
            let limited = ratio.clamp(0.8, 1.2)?.mul(&advantages)?;
            let loss = ratio.mul(&advantages)?.minimum(&limited)?.mean()?.neg()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>((loss, (&old - &new).mean().ok()?.detach()?))
        })?;
        passes += 1;
        record.tensor("loss", &loss)?;
        if moved.item::<f64>()?.abs() > 0.05 {
            break;
        }
    }
    record.integer("passes", passes);
    record.tensors("policy", &policy.parameters())?;
    Ok(record)
}

/// Actions from a squashed normal distribution; two critics, the worse of which counts; targets that follow.
fn soft_actor(step: &Step) -> Result<Record> {
    let (actor, critics) = (classifier(3, 12, 2)?, [classifier(4, 12, 1)?, classifier(4, 12, 1)?]);
    let target = classifier(4, 12, 1)?;
    target.requires_grad_(false)?;
    let actor_optimizer = optim::Adam::new(actor.parameters(), 0.01)?;
    let critic_parameters = critics.iter().flat_map(|critic| critic.parameters()).collect();
    let critic_optimizer = optim::Adam::new(critic_parameters, 0.02)?;
    let act = |state: &Tensor| {
        let out = actor.forward(state)?;
        let (mean, log_scale) = (out.narrow(1, 0, 1)?, out.narrow(1, 1, 1)?.clamp(-3.0, 1.0)?);
        let noise = mean.randn_like()?;
        let action = (mean + &noise * log_scale.exp()?).ok()?.tanh()?;
        let squash = (1.0 - &action * &action + 1e-6).log();
        let density = (noise.square()? * -0.5 - &log_scale - squash).ok()?;
        Ok::<_, kiln::Error>((action, density))
    };
    let mut record = Record::new();
    for _ in 0..3 {
        let (state, next) = (Tensor::randn([8, 3], &CPU)?, Tensor::randn([8, 3], &CPU)?);
        let (action, reward) = (Tensor::rand([8, 1], &CPU)?, Tensor::randn([8, 1], &CPU)?);
        let losses = step.run(|| {
            let wanted = {
                let _guard = no_grad();
                let (action, density) = act(&next)?;
                let value = target.forward(&Tensor::cat([&next, &action], 1)?)?;
                (&reward + (value - density * 0.1) * 0.9).ok()?
            };
            critic_optimizer.zero_grad();
            let pair = Tensor::cat([&state, &action], 1)?;
            let errors = critics.iter().map(|c| c.forward(&pair)?.mse_loss(&wanted, Reduction::Mean));
            let errors = errors.collect::<Result<Vec<_>>>()?;
            let critic_loss = (&errors[0] + &errors[1]).ok()?;
            critic_loss.backward()?;
            critic_optimizer.step()?;
            actor_optimizer.zero_grad();
            let (action, density) = act(&state)?;
            let pair = Tensor::cat([&state, &action], 1)?;
            let value = critics[0].forward(&pair)?.minimum(&critics[1].forward(&pair)?)?;
            let actor_loss = (density * 0.1 - value).mean().ok()?;
            actor_loss.backward()?;
            actor_optimizer.step()?;
            let _guard = no_grad();
            for (old, new) in target.parameters().iter().zip(critics[0].parameters()) {
                old.lerp_(&new, 0.05)?;
            }
            Tensor::stack([&critic_loss, &actor_loss], 0)
        })?;
        record.tensor("losses", &losses)?;
    }
    record.tensors("actor", &actor.parameters())?;
    Ok(record)
}

/// Arms of a bandit by upper confidence bounds; counts and means are kept as tensors.
fn bandit(step: &Step) -> Result<Record> {
    let truth = Tensor::from_slice(&[0.2f32, 0.5, 0.4, 0.7])?;
    let (counts, means) = (Tensor::ones([4], &CPU)?, Tensor::full([4], 0.5, &CPU)?);
    let mut record = Record::new();
    for time in 1..12 {
        let arm = step.run(|| {
            let bound = (&means + (2.0 * (time as f64).ln() / &counts).sqrt()).ok()?;
            let arm = bound.argmax()?;
            let reward = Tensor::rand([4], &CPU)?.lt(&truth)?.to_dtype(DType::F32)?;
            let chosen = arm.one_hot(4)?.to_dtype(DType::F32)?;
            counts.add_(&chosen)?;
            means.add_(&(chosen * (reward - &means) / &counts).ok()?)?;
            Ok::<_, kiln::Error>(arm)
        })?;
        record.tensor("arm", &arm)?;
    }
    record.tensors("state", [&counts, &means])?;
    Ok(record)
}

/// Values of states until they no longer change, asked by the host after each sweep.
fn value_iteration(step: &Step) -> Result<Record> {
    let moves = Tensor::randn([3, 6, 6], &CPU)?.mul(2.0)?.softmax(2)?;
    let (rewards, mut values) = (Tensor::randn([6], &CPU)?, Tensor::zeros([6], &CPU)?);
    let (mut sweeps, mut record) = (0, Record::new());
    loop {
        let (next, change) = step.run(|| {
            let next = (&rewards + moves.matmul(&values)?.amax_dim(0, false)? * 0.5).ok()?;
            let change = (&next - &values).abs().ok()?.amax()?;
            Ok::<_, kiln::Error>((next, change))
        })?;
        values = next;
        sweeps += 1;
        if change.item::<f32>()? < 1e-3 {
            break;
        }
    }
    record.integer("sweeps", sweeps);
    record.tensor("values", &values)?;
    record.tensor("policy", &moves.matmul(&values)?.argmax_dim(0, false)?)?;
    Ok(record)
}

/// No gradients at all: noise on the weights, ranked by how well it does.
fn evolution_strategies(step: &Step) -> Result<Record> {
    let (w, x) = (Tensor::zeros([5], &CPU)?, Tensor::randn([20, 5], &CPU)?);
    let y = x.mv(&Tensor::linspace(-1.0, 1.0, 5, &CPU)?)?;
    let mut record = Record::new();
    for _ in 0..6 {
        let best = step.run(|| {
            let noise = Tensor::randn([12, 5], &CPU)?;
            let tried = (&noise * 0.3 + &w).ok()?;
            let errors = (tried.mm(&x.t()?)? - &y).square().ok()?.mean_dim(1, false)?;
            let rank = errors.argsort(0, true)?.argsort(0, false)?.to_dtype(DType::F32)?;
            let weights = (rank / 11.0 - 0.5).ok()?;
            w.add_(&noise.t()?.mv(&weights)?.mul(0.1)?)?;
            errors.amin()
        })?;
        record.tensor("best", &best)?;
    }
    record.tensor("w", &w)?;
    Ok(record)
}
