use std::time::Duration;

use super::sim::{BLOCK, Lab, request, settle};
use crate::actors::shared::Config;
use crate::core::options::Options;
use crate::core::types::{Mode, Rung, Tokens};

const K: Tokens = 92_104;

#[tokio::test(start_paused = true)]
async fn a_session_is_seeded_once_and_then_direct() {
    let lab = Lab::start(Options::production(), 1, 3, K).await;
    let first = lab.turn(request("s", 1, 0, 500)).await;
    assert_eq!((first.mode, first.rung), (Mode::Seed, Rung::Full));
    assert_eq!(first.prefill.as_ref().map(|p| &*p.name), Some("p0"));
    for turn in 1..5 {
        let plan = lab.turn(request("s", 1, turn, 500 + 10 * turn as usize)).await;
        assert_eq!((plan.mode, plan.rung, &plan.decode), (Mode::Direct, Rung::Append, &first.decode));
        assert_eq!(plan.prefill, None);
        assert!(plan.reuse_blocks as usize >= 500 + 10 * (turn as usize - 1));
    }
    lab.assert_clean().await;
}

/// R4: sessions spread, also when all share one system prompt.
#[tokio::test(start_paused = true)]
async fn new_sessions_spread_over_the_workers() {
    let lab = Lab::start(Options::production(), 1, 3, K).await;
    let mut used = std::collections::HashMap::new();
    for s in 0..9u64 {
        let mut r = request(&format!("s{s}"), 7, 0, 620);
        let mut chain = r.chain.to_vec();
        chain.extend(super::sim::chain(100 + s, 200));
        (r.input_len, r.chain) = (820 * BLOCK, chain.into());
        *used.entry(lab.turn(r).await.decode.name).or_insert(0) += 1;
    }
    assert_eq!(used.len(), 3, "{used:?}");
    assert!(used.values().all(|n| *n >= 2), "{used:?}");
}

/// Sessions that start in the same moment see each other: no herd on the first worker.
#[tokio::test(start_paused = true)]
async fn sessions_that_start_together_spread() {
    let lab = Lab::start(Options::production(), 1, 3, K).await;
    let starts = (0..9u64).map(|s| {
        let router = lab.router.clone();
        tokio::spawn(async move { router.route(request(&format!("s{s}"), s, 0, 600)).await.unwrap() })
    });
    let mut used = std::collections::HashMap::new();
    let mut grants = Vec::new();
    for start in starts.collect::<Vec<_>>() {
        let grant = start.await.unwrap();
        *used.entry(grant.plan.decode.name.clone()).or_insert(0) += 1;
        grants.push(grant);
    }
    assert!(used.len() == 3 && used.values().all(|n| *n == 3), "{used:?}");
}

#[tokio::test(start_paused = true)]
async fn a_turn_waits_for_room_and_gets_it() {
    let lab = Lab::start(Options::production(), 1, 1, 1000 * BLOCK).await;
    let (a, b) = (request("a", 1, 0, 600), request("b", 2, 0, 600));
    let running = lab.router.route(a.clone()).await.unwrap();
    let router = lab.router.clone();
    let waiting = tokio::spawn(async move { router.route(b).await });
    settle().await;
    assert_eq!(lab.router.router().await.unwrap().waiting, 1);
    assert!(lab.serve(&running.plan, &a, 1));
    running.finished(Default::default());
    let grant = waiting.await.unwrap().unwrap();
    assert_eq!(grant.plan.mode, Mode::Seed);
    drop(grant);
    lab.assert_clean().await;
}

/// D5: past its deadline a turn falls back to the D with room for it, else it is told to come back.
#[tokio::test(start_paused = true)]
async fn the_wait_ends_with_429_when_nothing_can_fit() {
    let lab = Lab::start(Options::production(), 1, 1, 1000 * BLOCK).await;
    let running = lab.router.route(request("a", 1, 0, 600)).await.unwrap();
    let started = tokio::time::Instant::now();
    let refusal = lab.router.route(request("b", 2, 0, 600)).await.unwrap_err();
    assert_eq!((refusal.status, refusal.code, refusal.retry_after), (429, "no_capacity", Some(2)));
    assert_eq!(started.elapsed().as_secs(), 30);
    drop(running);
    lab.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn too_large_is_413_and_between_rho_and_k_is_an_exclusive_fallback() {
    let options = Options { rho: 0.95, ..Options::production() };
    let lab = Lab::start(options, 1, 2, 1000 * BLOCK).await;
    let refusal = lab.router.route(request("a", 1, 0, 1000)).await.unwrap_err();
    assert_eq!((refusal.status, refusal.code), (413, "prompt_too_large"));
    let plan = lab.turn(request("b", 2, 0, 980)).await;
    assert_eq!((plan.mode, plan.lease), (Mode::Fallback, None));
    // D6: the completed Fallback pins, so the next turn finds its KV.
    let next = lab.router.route(request("b", 2, 1, 940)).await.unwrap();
    assert_eq!((next.plan.mode, &next.plan.decode), (Mode::Direct, &plan.decode));
    drop(next);
    lab.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn no_worker_is_503() {
    let lab = Lab::start(Options::production(), 0, 0, K).await;
    let refusal = lab.router.route(request("a", 1, 0, 10)).await.unwrap_err();
    assert_eq!((refusal.status, refusal.code), (503, "no_workers"));
    assert!(!lab.router.is_ready());
}

#[tokio::test(start_paused = true)]
async fn without_p_every_rung_is_local() {
    let lab = Lab::start(Options::production(), 0, 2, K).await;
    let plan = lab.turn(request("s", 1, 0, 2000)).await;
    assert_eq!((plan.mode, plan.rung, plan.prefill), (Mode::Seed, Rung::Local, None));
}

/// A3: an append over `τ_append` stays on its D as a Reseed; in `paper` it is a reject.
#[tokio::test(start_paused = true)]
async fn a_large_append_takes_the_ladder() {
    let lab = Lab::start(Options::production(), 1, 2, K).await;
    let first = lab.turn(request("s", 1, 0, 500)).await;
    let plan = lab.turn(request("s", 1, 1, 1000)).await;
    assert_eq!((plan.mode, plan.rung, &plan.decode), (Mode::Reseed, Rung::Local, &first.decode));
    let paper = Lab::start(Options::paper(), 1, 2, K).await;
    let first = paper.turn(request("s", 1, 0, 500)).await;
    let plan = paper.turn(request("s", 1, 1, 1000)).await;
    assert_eq!((plan.mode, plan.rung), (Mode::Reseed, Rung::Full));
    assert_ne!(plan.decode, first.decode);
}

#[tokio::test(start_paused = true)]
async fn a_resting_session_keeps_its_pin_and_costs_no_actor() {
    let config = Config { passivate: Duration::from_secs(5), ..Config::default() };
    let lab = Lab::with(config, 1, 3, K).await;
    let first = lab.turn(request("s", 1, 0, 500)).await;
    assert_eq!(lab.router.sessions_known(), (1, 0));
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(lab.router.sessions_known(), (0, 1));
    let plan = lab.turn(request("s", 1, 1, 505)).await;
    assert_eq!((plan.mode, plan.decode), (Mode::Direct, first.decode));
    assert_eq!(lab.router.sessions_known(), (1, 0));
    tokio::time::sleep(Config::default().session_ttl + Duration::from_secs(120)).await;
    assert_eq!(lab.router.sessions_known(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn the_book_is_bounded() {
    let config = Config { passivate: Duration::from_millis(1), max_sessions: 64, ..Config::default() };
    let lab = Lab::with(config, 1, 1, K).await;
    for s in 0..300 {
        lab.turn(request(&format!("s{s}"), s, 0, 10)).await;
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    let (live, resting) = lab.router.sessions_known();
    assert!(live + resting <= 128, "{live} live, {resting} resting");
}

/// A side request is served like any other and leaves nothing: no session, no pin, no residency.
#[tokio::test(start_paused = true)]
async fn one_shot_turns_leave_nothing() {
    let lab = Lab::start(Options::production(), 1, 1, K).await;
    let mut side = request("side", 1, 0, 50);
    side.one_shot = true;
    assert!(lab.turn(side).await.one_shot);
    settle().await;
    assert_eq!(lab.router.sessions_known(), (0, 0));
    assert_eq!(lab.node("d0").with(|l, _| l.residency().blocks()), 0);
    lab.assert_clean().await;
}

/// D9: executions of one session may overlap; its decisions do not, and its books balance.
#[tokio::test(start_paused = true)]
async fn overlapping_turns_of_one_session() {
    let lab = Lab::start(Options::production(), 1, 3, K).await;
    let first = lab.turn(request("s", 1, 0, 500)).await;
    let (x, y) = (request("s", 1, 1, 510), request("s", 1, 1, 520));
    let a = lab.router.route(x.clone()).await.unwrap();
    let b = lab.router.route(y.clone()).await.unwrap();
    assert_eq!((&a.plan.decode, &b.plan.decode), (&first.decode, &first.decode));
    assert_eq!(lab.router.workers().await.iter().map(|w| w.inflight).sum::<u32>(), 2);
    assert!(lab.serve(&b.plan, &y, 1) && lab.serve(&a.plan, &x, 1));
    b.finished(Default::default());
    a.finished(Default::default());
    lab.assert_clean().await;
}

/// A live decision's record replays to the same decision.
#[tokio::test(start_paused = true)]
async fn records_replay() {
    for options in [Options::production(), Options::paper()] {
        let lab = Lab::start(options, 1, 3, 4000 * BLOCK).await;
        let mut records = Vec::new();
        for turn in 0..6u32 {
            for s in 0..7u64 {
                let size = 400 + 60 * turn as usize + 30 * s as usize + if turn == 4 { 600 } else { 0 };
                let mut r = request(&format!("s{s}"), s, turn, size);
                r.explain = true;
                let grant = lab.router.route(r.clone()).await.unwrap();
                records.push(grant.record.clone().unwrap());
                lab.serve(&grant.plan, &r, 1);
                grant.finished(Default::default());
                settle().await;
            }
        }
        let json = serde_json::to_string(&records).unwrap();
        let (text, met) = crate::explain::run(&json).unwrap();
        assert!(met, "{text}");
        let kinds: std::collections::HashSet<_> =
            records.iter().map(|r| r.expect.as_ref().unwrap().outcome.mode.clone()).collect();
        assert!(kinds.len() >= 3, "only {kinds:?}");
    }
}
