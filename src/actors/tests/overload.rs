//! Too much at once, and workers whose turns fail: bounded, fair, and over when it is over.

use std::time::Duration;

use super::sim::{BLOCK, Lab, request, settle};
use crate::actors::grant::Grant;
use crate::actors::shared::Config;
use crate::actors::worker::Health;
use crate::core::breaker::{Fault, Limits};
use crate::core::options::Options;
use crate::core::turn::Failure;
use crate::core::types::{Mode, Tokens};

const K: Tokens = 92_104;

async fn health(lab: &Lab, name: &str) -> Health {
    lab.router.worker(name).await.unwrap().health
}

/// Sessions that start now, and where.
async fn start(lab: &Lab, seeds: std::ops::Range<u64>) -> Vec<Grant> {
    let mut grants = Vec::new();
    for seed in seeds {
        grants.push(lab.router.route(request(&format!("s{seed}"), seed, 0, 20)).await.unwrap());
    }
    grants
}

#[tokio::test(start_paused = true)]
async fn a_worker_whose_turns_fail_is_left_alone_tried_and_taken_back() {
    let breaker = Limits { failures: 3, open_ms: 5000 };
    let lab = Lab::with(Config { breaker, ..Config::default() }, 0, 2, K).await;
    let mut failures = 0;
    for grant in start(&lab, 0..6).await {
        if &*grant.plan.decode.name == "d0" {
            failures += 1;
            grant.broken(Fault::Broken);
        }
    }
    settle().await;
    assert_eq!((failures, health(&lab, "d0").await), (3, Health::Tripped));
    let elsewhere = start(&lab, 10..16).await;
    assert!(elsewhere.iter().all(|grant| &*grant.plan.decode.name == "d1"));
    tokio::time::sleep(Duration::from_secs(5)).await;
    // One turn at a time is tried; the others stay away until it is over.
    let tried = start(&lab, 20..30).await;
    let on_trial: Vec<_> = tried.into_iter().filter(|grant| &*grant.plan.decode.name == "d0").collect();
    assert_eq!(on_trial.len(), 1);
    for grant in on_trial {
        grant.broken(Fault::Error(1));
    }
    settle().await;
    assert_eq!(health(&lab, "d0").await, Health::Tripped);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(start(&lab, 30..34).await.iter().all(|grant| &*grant.plan.decode.name == "d1"), "twice as long");
    tokio::time::sleep(Duration::from_secs(5)).await;
    for (seed, grant) in (40..).zip(start(&lab, 40..50).await) {
        if &*grant.plan.decode.name == "d0" {
            assert!(lab.serve(&grant.plan, &request(&format!("s{seed}"), seed, 0, 20), 1));
            grant.finished(Default::default());
        }
    }
    settle().await;
    assert_eq!(health(&lab, "d0").await, Health::Up);
    let both = start(&lab, 50..60).await;
    assert!(both.iter().filter(|grant| &*grant.plan.decode.name == "d0").count() > 2);
    drop((elsewhere, both));
    lab.assert_clean().await;
}

/// A busy worker, a client that leaves and one session's poison are no failures of a worker.
#[tokio::test(start_paused = true)]
async fn nothing_but_real_failures_trips() {
    let breaker = Limits { failures: 2, open_ms: 5000 };
    let lab = Lab::with(Config { breaker, ..Config::default() }, 1, 2, K).await;
    for turn in 0..20 {
        let grant = lab.router.route(request("s", 1, turn, 20)).await.unwrap();
        let grant = grant.failed(Failure::Busy).await.unwrap();
        let refusal = grant.failed(Failure::Busy).await.unwrap_err();
        assert_eq!((refusal.status, refusal.code), (429, "workers_busy"), "re-placed once, then told");
        drop(lab.router.route(request("s", 1, turn, 20)).await.unwrap());
        lab.router.route(request("s", 1, turn, 20)).await.unwrap().broken(Fault::Error(7));
        let grant = lab.router.route(request("p", 2, turn, 900)).await.unwrap();
        drop(grant.failed(Failure::PrefillBusy).await);
        settle().await;
    }
    for worker in ["d0", "d1", "p0"] {
        assert_eq!(health(&lab, worker).await, Health::Up, "{worker}");
    }
    lab.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn a_session_may_have_so_many_turns_at_once() {
    let config = Config { max_session_turns: 3, ..Config::default() };
    let lab = Lab::with(config, 0, 1, K).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(lab.router.route(request("s", 1, 0, 20)).await.unwrap());
    }
    let refusal = lab.router.route(request("s", 1, 0, 20)).await.unwrap_err();
    assert_eq!((refusal.status, refusal.code, refusal.retry_after), (429, "session_busy", Some(1)));
    assert!(lab.router.route(request("other", 2, 0, 20)).await.is_ok());
    held.pop();
    settle().await;
    assert!(lab.router.route(request("s", 1, 0, 20)).await.is_ok());
    drop(held);
    settle().await;
    lab.assert_clean().await;
}

/// Two hundred turns wait; what one lease frees is offered to a few of them, not to all.
#[tokio::test(start_paused = true)]
async fn room_for_none_wakes_few() {
    let lab = Lab::start(Options::production(), 0, 1, 1000 * BLOCK).await;
    let big = request("big", 1, 0, 850);
    let running = lab.router.route(big.clone()).await.unwrap();
    let small = lab.router.route(request("small", 2, 0, 40)).await.unwrap();
    let waiting: Vec<_> = (0..200u64)
        .map(|s| {
            let router = lab.router.clone();
            tokio::spawn(async move { router.route(request(&format!("w{s}"), 10 + s, 0, 700)).await })
        })
        .collect();
    settle().await;
    let before = lab.router.router().await.unwrap();
    assert_eq!(before.waiting, 200);
    drop(small);
    settle().await;
    let after = lab.router.router().await.unwrap();
    let gathers = after.gathers - before.gathers;
    assert!((1..=40).contains(&gathers), "{gathers} gathers for room that fits nobody");
    assert_eq!(after.waiting, 200);
    drop(running);
    settle().await;
    assert_eq!(lab.router.router().await.unwrap().waiting, 199, "one of them fits now");
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    drop(waiting);
    settle().await;
    lab.assert_clean().await;
}

/// One session with a hundred turns waiting does not keep another one's turn waiting behind all of them.
#[tokio::test(start_paused = true)]
async fn a_session_with_many_turns_waits_for_others_too() {
    let lab = Lab::start(Options::production(), 0, 1, 1000 * BLOCK).await;
    let mut running = lab.router.route(request("first", 1, 0, 900)).await.unwrap();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let ask = |session: &'static str, seed: u64, turns: usize| {
        for turn in 0..turns as u64 {
            // Different prompts: nothing of one's KV serves another.
            let seed = seed + turn;
            let (router, tell) = (lab.router.clone(), tell.clone());
            tokio::spawn(async move {
                if let Ok(grant) = router.route(request(session, seed, 0, 600)).await {
                    let _ = tell.send((session, grant));
                }
            });
        }
    };
    ask("greedy", 100, 60);
    settle().await;
    ask("modest", 3, 1);
    settle().await;
    let mut order = Vec::new();
    for _ in 0..3 {
        drop(running);
        let (session, grant) = told.recv().await.unwrap();
        order.push(session);
        running = grant;
        // Whoever was woken for the same room has been told that it is gone.
        settle().await;
    }
    assert_eq!(order, ["greedy", "modest", "greedy"]);
    assert_eq!(running.plan.mode, Mode::Seed);
}
