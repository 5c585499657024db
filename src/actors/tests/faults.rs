use std::time::Duration;

use super::sim::{BLOCK, Lab, request, settle};
use crate::actors::api::Failure;
use crate::actors::router::RouterMsg;
use crate::actors::session::SessionMsg;
use crate::actors::slot::Role;
use crate::actors::worker::{Health, WorkerMsg};
use crate::core::options::Options;
use crate::core::types::{Mode, SessionId, Tokens, WorkerId};

const K: Tokens = 92_104;

/// A reply lost after its effect: the same request id is asked again and gets the same lease, once.
#[tokio::test(start_paused = true)]
async fn a_lost_admit_reply_reserves_once() {
    let lab = Lab::start(Options::production(), 1, 1, K).await;
    lab.node("d0").faults(|f| f.lose_admit_replies = 1);
    let grant = lab.router.route(request("s", 1, 0, 500)).await.unwrap();
    assert_eq!((grant.plan.mode, grant.plan.decode.id), (Mode::Seed, WorkerId(0)));
    assert_eq!((lab.node("d0").admits(), lab.node("d0").with(|l, _| l.leases())), (2, 1));
    drop(grant);
    lab.assert_clean().await;
}

/// Twice silent is a connect failure: what the lost requests reserved is returned, another D serves the turn.
#[tokio::test(start_paused = true)]
async fn a_silent_worker_is_left_and_its_leases_return() {
    let lab = Lab::start(Options::production(), 1, 2, K).await;
    lab.node("d0").faults(|f| f.lose_admit_replies = 2);
    let grant = lab.router.route(request("s", 1, 0, 500)).await.unwrap();
    assert_eq!(grant.plan.decode.id, WorkerId(1));
    settle().await;
    assert_eq!(lab.node("d0").with(|l, _| l.leases()), 0);
    drop(grant);
    lab.assert_clean().await;
}

/// The pinned D dies: the same request is served elsewhere, and no reject is counted.
#[tokio::test(start_paused = true)]
async fn a_dead_pin_is_replaced_within_the_request() {
    let lab = Lab::start(Options::production(), 1, 2, K).await;
    let first = lab.turn(request("s", 1, 0, 500)).await;
    lab.node(&first.decode.name).faults(|f| f.down = true);
    let plan = lab.turn(request("s", 1, 1, 510)).await;
    assert_eq!(plan.mode, Mode::Reseed);
    assert_ne!(plan.decode, first.decode);
    let view = lab.router.sessions(9).await.pop().unwrap();
    assert!(view.rejects.is_empty());
    assert_eq!(view.pin.as_deref(), Some(&*plan.decode.name));
}

/// D8: a turn that fails before its first byte is placed again; the lease it had goes back.
#[tokio::test(start_paused = true)]
async fn failures_before_the_first_byte_are_replaced_a_bounded_number_of_times() {
    let lab = Lab::start(Options::production(), 1, 3, K).await;
    let mut grant = lab.router.route(request("s", 1, 0, 500)).await.unwrap();
    let mut tried = vec![grant.plan.decode.id];
    for n in 1..3 {
        grant = grant.failed(Failure::DecodeUnreachable).await.unwrap();
        assert_eq!(grant.plan.replaced, n);
        assert!(!tried.contains(&grant.plan.decode.id));
        tried.push(grant.plan.decode.id);
    }
    let refusal = grant.failed(Failure::DecodeUnreachable).await.unwrap_err();
    assert_eq!(refusal.status, 503);
    lab.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn a_stale_plan_is_admitted_anew_and_a_busy_worker_is_left_once() {
    let lab = Lab::start(Options::production(), 1, 2, K).await;
    let first = lab.turn(request("s", 1, 0, 500)).await;
    let grant = lab.router.route(request("s", 1, 1, 510)).await.unwrap();
    let again = grant.failed(Failure::PlanMismatch).await.unwrap();
    assert_eq!(again.plan.decode, first.decode);
    let elsewhere = again.failed(Failure::Busy).await.unwrap();
    assert_ne!(elsewhere.plan.decode, first.decode);
    let refusal = elsewhere.failed(Failure::Busy).await.unwrap_err();
    assert_eq!((refusal.status, refusal.code), (429, "workers_busy"));
    lab.assert_clean().await;
}

/// A client that leaves at any moment leaves nothing behind.
#[tokio::test(start_paused = true)]
async fn cancellation_at_every_stage() {
    let lab = Lab::start(Options::production(), 1, 1, 1000 * BLOCK).await;
    lab.node("d0").faults(|f| f.admit_delay = Duration::from_millis(50));
    for wait in [0, 1, 49, 50, 51, 60] {
        let route = lab.router.route(request(&format!("s{wait}"), wait, 0, 300));
        let _ = tokio::time::timeout(Duration::from_millis(wait), route).await;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    lab.assert_clean().await;
    // In the wait queue.
    let running = lab.router.route(request("a", 101, 0, 600)).await.unwrap();
    let waiting = lab.router.route(request("b", 102, 0, 600));
    assert!(tokio::time::timeout(Duration::from_secs(2), waiting).await.is_err());
    settle().await;
    assert_eq!(lab.router.router().await.unwrap().waiting, 0);
    drop(running);
    tokio::time::sleep(Duration::from_millis(200)).await;
    lab.assert_clean().await;
}

/// A session actor that panics loses its running turn and nothing else; its pin comes back from the mirrors.
#[tokio::test(start_paused = true)]
async fn a_session_panic_loses_at_most_its_running_turn() {
    let lab = Lab::start(Options::production(), 1, 3, K).await;
    let first = lab.turn(request("s", 1, 0, 500)).await;
    let other = lab.router.route(request("other", 2, 0, 500)).await.unwrap();
    let running = lab.router.route(request("s", 1, 1, 510)).await.unwrap();
    let actors = lab.router.shared().book.live(9);
    let (_, actor) = actors.into_iter().find(|(id, _)| *id == SessionId::new("s")).unwrap();
    actor.cast(SessionMsg::Panic).unwrap();
    settle().await;
    let workers = lab.router.workers().await;
    let inflight: u32 = workers.iter().filter(|w| w.role == Role::Decode).map(|w| w.inflight).sum();
    assert_eq!(inflight, 1, "only the other session's turn still counts");
    assert_eq!(lab.router.sessions_known(), (1, 0), "the book forgets an actor that is gone");
    // Its lease is in the hands of whoever executes it.
    let leases = || lab.node(&first.decode.name).with(|l, _| l.leases());
    let before = leases();
    drop(running);
    settle().await;
    assert_eq!(leases(), before - 1);
    let plan = lab.turn(request("s", 1, 1, 510)).await;
    assert_eq!((plan.mode, plan.decode), (Mode::Direct, first.decode));
    drop(other);
    lab.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_actor_panic_is_a_resync() {
    let lab = Lab::start(Options::production(), 1, 2, K).await;
    let first = lab.turn(request("s", 1, 0, 500)).await;
    let running = lab.router.route(request("x", 2, 0, 500)).await.unwrap();
    for slot in lab.router.shared().workers().iter() {
        slot.cast(WorkerMsg::Panic);
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(lab.router.restarts(), 3);
    let states = lab.router.workers().await;
    assert!(states.iter().all(|w| w.health == Health::Up && w.resyncs == 1), "{states:?}");
    assert_eq!(states.iter().map(|w| w.sessions).sum::<usize>(), 1);
    assert_eq!(states.iter().filter(|w| w.name.starts_with('d')).map(|w| w.inflight).sum::<u32>(), 1);
    let plan = lab.turn(request("s", 1, 1, 510)).await;
    assert_eq!((plan.mode, plan.decode), (Mode::Direct, first.decode));
    drop(running);
    lab.assert_clean().await;
}

/// The actor of a session dies while its turn is asked for, waits for a new placement, or has just been given back.
#[tokio::test(start_paused = true)]
async fn a_session_panic_leaves_no_lease() {
    let lab = Lab::start(Options::production(), 1, 1, K).await;
    let leases = || lab.node("d0").with(|l, _| l.leases());
    let panics = || {
        let actors = lab.router.shared().book.live(9);
        actors.into_iter().for_each(|(_, actor)| actor.cast(SessionMsg::Panic).unwrap());
    };
    // Its worker has reserved; the reply is lost, and so is the actor.
    lab.node("d0").faults(|f| f.lose_admit_replies = 1);
    let router = lab.router.clone();
    let asking = tokio::spawn(async move { router.route(request("a", 1, 0, 500)).await });
    settle().await;
    assert_eq!(leases(), 1);
    panics();
    let grant = asking.await.unwrap().unwrap();
    settle().await;
    assert_eq!(
        (&*grant.plan.request_id, leases()),
        ("1-2-1", 1),
        "it is placed anew, and only that is reserved"
    );
    drop(grant);
    settle().await;
    // What was said to it before it died is read by nobody.
    for failed in [false, true] {
        let grant = lab.router.route(request("b", 2, 0, 500)).await.unwrap();
        assert_eq!(leases(), 1);
        panics();
        if failed {
            assert_eq!(grant.failed(Failure::PlanMismatch).await.unwrap_err().code, "turn_lost");
        } else {
            drop(grant);
        }
        settle().await;
        assert_eq!(leases(), 0, "failed: {failed}");
    }
    lab.assert_clean().await;
}

/// A lease goes back although the worker's actor dies with all that is in its mailbox.
#[tokio::test(start_paused = true)]
async fn a_worker_actor_panic_keeps_no_lease() {
    let lab = Lab::start(Options::production(), 1, 1, K).await;
    let grant = lab.router.route(request("s", 1, 0, 500)).await.unwrap();
    lab.router.shared().workers()[0].cast(WorkerMsg::Panic);
    drop(grant);
    settle().await;
    assert_eq!(lab.node("d0").with(|l, _| l.leases()), 0);
}

/// A lease goes back although the worker's actor has just been restarted and has not heard of its node yet.
#[tokio::test(start_paused = true)]
async fn a_release_does_not_wait_for_the_mirror() {
    let lab = Lab::start(Options::production(), 1, 1, K).await;
    let grant = lab.router.route(request("s", 1, 0, 500)).await.unwrap();
    lab.node("d0").faults(|f| f.frozen = true);
    lab.router.shared().workers()[0].cast(WorkerMsg::Panic);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(lab.router.workers().await[0].epoch, 0);
    drop(grant);
    settle().await;
    assert_eq!(lab.node("d0").with(|l, _| l.leases()), 0);
}

/// Whoever waits in the queue of a router actor that dies is served by the next one.
#[tokio::test(start_paused = true)]
async fn a_router_actor_panic_loses_no_turn() {
    let lab = Lab::start(Options::production(), 1, 1, 1000 * BLOCK).await;
    let a = request("a", 1, 0, 600);
    let running = lab.router.route(a.clone()).await.unwrap();
    let router = lab.router.clone();
    let waiting = tokio::spawn(async move { router.route(request("b", 2, 0, 600)).await });
    settle().await;
    lab.router.shared().router(RouterMsg::Panic);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(lab.router.restarts(), 1);
    assert!(lab.serve(&running.plan, &a, 1));
    running.finished(Default::default());
    assert_eq!(waiting.await.unwrap().unwrap().plan.mode, Mode::Seed);
    settle().await;
    lab.assert_clean().await;
}

/// A node that restarts in place is a new epoch: its old blocks are forgotten, its sessions reseeded.
#[tokio::test(start_paused = true)]
async fn a_restarted_node_is_empty() {
    let lab = Lab::start(Options::production(), 1, 1, K).await;
    lab.turn(request("s", 1, 0, 500)).await;
    lab.node("d0").restart();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let state = lab.router.workers().await.remove(0);
    assert_eq!((state.epoch, state.sessions, state.blocks, state.health), (2, 0, 0, Health::Up));
    let plan = lab.turn(request("s", 1, 1, 510)).await;
    assert_eq!(plan.mode, Mode::Reseed);
    assert_eq!(plan.lease.unwrap().epoch, 2);
}

/// Draining: no new turn goes there, its sessions move without an error.
#[tokio::test(start_paused = true)]
async fn a_drained_worker_gets_no_turns() {
    let lab = Lab::start(Options::production(), 1, 2, K).await;
    let first = lab.turn(request("s", 1, 0, 500)).await;
    assert!(lab.router.drain(&first.decode.name, true) && !lab.router.drain("nobody", true));
    settle().await;
    let plan = lab.turn(request("s", 1, 1, 510)).await;
    assert_eq!(plan.mode, Mode::Reseed);
    assert_ne!(plan.decode, first.decode);
}

#[tokio::test(start_paused = true)]
async fn more_turns_than_allowed_are_refused_at_once() {
    let config = crate::actors::shared::Config { max_inflight: 2, ..Default::default() };
    let lab = Lab::with(config, 1, 1, K).await;
    let a = lab.router.route(request("a", 1, 0, 10)).await.unwrap();
    let b = lab.router.route(request("b", 2, 0, 10)).await.unwrap();
    let refusal = lab.router.route(request("c", 3, 0, 10)).await.unwrap_err();
    assert_eq!((refusal.status, refusal.code), (429, "overloaded"));
    drop((a, b));
    settle().await;
    assert!(lab.router.route(request("c", 3, 0, 10)).await.is_ok());
}

/// A node that freezes keeps its connections open. The feed notices; whoever executes a turn there is told.
#[tokio::test(start_paused = true)]
async fn a_frozen_worker_is_lost_and_its_turns_are_told() {
    let lab = Lab::start(Options::production(), 1, 2, K).await;
    let grant = lab.router.route(request("s", 1, 0, 500)).await.unwrap();
    let home = grant.plan.decode.name.clone();
    let lost = tokio::spawn(lab.router.lost(&grant.plan));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!lost.is_finished());
    lab.node(&home).faults(|f| f.frozen = true);
    let frozen = tokio::time::Instant::now();
    assert_eq!(lost.await.unwrap(), Failure::DecodeUnreachable);
    assert!(frozen.elapsed() <= Duration::from_secs(7), "{:?}", frozen.elapsed());
    let grant = grant.failed(Failure::DecodeUnreachable).await.unwrap();
    assert_ne!(grant.plan.decode.name, home);
    drop(grant);
    lab.node(&home).faults(|f| f.frozen = false);
    assert!(lab.router.all_up(Duration::from_secs(10)).await);
}
