//! What must hold when everything is well again: nothing is left over, mirrors are true, sums add up.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kvc_router::actors::handle::TurnRouter;
use kvc_router::actors::worker::Health;
use tokio::time::sleep;

use super::client::World;
use super::counters::Counters;
use super::net::Net;
use super::schedule::Schedule;

type Routers = [(TurnRouter, u64)];

/// The fleet comes back; turns that are over have left nothing behind them.
pub async fn settles(net: &Arc<Net>, world: &Rc<World>, schedule: &Schedule, routers: &Routers) {
    all_up(net, routers).await;
    net.awake().await;
    sleep(Duration::from_secs(3)).await;
    if net.rules.violations().is_empty() && !net.rules.is_leaky() {
        leases(net, "leases that nobody gave back");
    }
    sessions(net, world, schedule, routers).await;
    // A message that was lost or delayed right before the end may be missed only now.
    sleep(Duration::from_secs(8)).await;
    all_up(net, routers).await;
}

async fn all_up(net: &Arc<Net>, routers: &Routers) {
    for (turns, _) in routers {
        if !turns.all_up(Duration::from_secs(30)).await {
            net.rules.violated("a worker does not come up again");
        }
    }
}

fn leases(net: &Arc<Net>, what: &str) {
    for node in &net.nodes {
        let Some(life) = node.life() else { continue };
        let (leases, waiting, running) =
            life.app.engine.with(|s, _| (s.ledger.leases(), s.waiting.len(), s.running()));
        if leases + waiting + running > 0 {
            let problem =
                format!("{}: {what}: {leases} leases, {waiting} waiting, {running} running", node.name);
            net.rules.violated(problem);
        }
    }
}

async fn sessions(net: &Arc<Net>, world: &Rc<World>, schedule: &Schedule, routers: &Routers) {
    for (gateway, (turns, instance)) in routers.iter().enumerate() {
        let life = world.gateways[gateway].life.get();
        for view in turns.sessions(1000).await {
            net.rules.session(*instance, &view, &schedule.options);
            let answered = world.answered.borrow();
            let served =
                answered.iter().filter(|a| a.0 == view.session && a.1 == gateway && a.2 == life).count();
            // Clients that leave at the last event may have been served without knowing it.
            if view.turns > served as u64 + world.ends.borrow().left {
                net.rules
                    .violated(format!("{}: {} turns completed, {served} served", view.session, view.turns));
            }
        }
    }
}

/// Nothing is left of any turn, anywhere.
pub async fn nothing_is_left(
    net: &Arc<Net>,
    world: &Rc<World>,
    schedule: &Schedule,
    routers: &Routers,
    counters: &Counters,
) {
    sleep(Duration::from_secs(1)).await;
    sessions(net, world, schedule, routers).await;
    mirrors(net, routers).await;
    // Leases whose release was lost last until they expire, sessions until they rest.
    sleep(
        Duration::from_millis(schedule.options.lease_ms).max(Duration::from_secs(5)) + Duration::from_secs(1),
    )
    .await;
    leases(net, "left over");
    for node in &net.nodes {
        let Some(life) = node.life() else { continue };
        let engine = &life.app.engine;
        let problem = engine.with(|s, _| {
            let reserved = s.ledger.occupied_blocks() - s.ledger.residency().blocks();
            let reserved = (reserved > 0).then(|| format!("{reserved} blocks reserved for nobody"));
            reserved.or_else(|| s.audit().err())
        });
        if let Some(problem) = problem {
            net.rules.violated(format!("{}: {problem}", node.name));
        }
        if engine.inbox.waiting() > 0 || engine.receiving() > 0 {
            net.rules.violated(format!("{}: transfers are left over", node.name));
        }
    }
    for (turns, _) in routers {
        let (live, _) = turns.sessions_known();
        if turns.inflight() > 0 || live > 0 {
            net.rules
                .violated(format!("{} permits and {live} session actors are left over", turns.inflight()));
        }
        for worker in turns.workers().await {
            if worker.inflight > 0 || worker.backlog_tokens > 0 {
                net.rules.violated(format!(
                    "{}: inflight {}, backlog {}",
                    worker.name, worker.inflight, worker.backlog_tokens
                ));
            }
        }
        if turns.router().await.is_none_or(|router| router.waiting > 0) {
            net.rules.violated("somebody waits for room although nobody runs");
        }
    }
    let (asked, counted, inflight) = (world.ends.borrow().asked, counters.requests(), counters.inflight());
    if asked != counted || inflight != 0.0 {
        net.rules.violated(format!("{asked} requests, {counted} outcomes, {inflight} in flight"));
    }
}

/// Every mirror is what its node holds.
async fn mirrors(net: &Arc<Net>, routers: &Routers) {
    for (turns, _) in routers {
        for worker in turns.workers().await {
            let Some(place) = net.host(&worker.name) else { continue };
            let Some(life) = net.nodes[place].life() else { continue };
            let engine = &life.app.engine;
            let truth = engine.with(|s, _| {
                let held = s.ledger.residency();
                (engine.epoch, s.log.seq(), held.sessions().count(), s.backups.tier.len())
            });
            let mirror = (worker.epoch, worker.seq, worker.sessions, worker.backup_blocks);
            if worker.health != Health::Up || truth != mirror {
                net.rules.violated(format!(
                    "{}: mirror {mirror:?}, truth {truth:?}, {:?}",
                    worker.name, worker.health
                ));
            }
            let chains = engine.with(|s, _| {
                let held = s.ledger.residency();
                held.sessions()
                    .flat_map(|(_, h)| h.chain.iter().copied())
                    .collect::<std::collections::HashSet<_>>()
                    .len()
            });
            if chains != worker.blocks {
                net.rules
                    .violated(format!("{}: {} blocks mirrored, {chains} held", worker.name, worker.blocks));
            }
        }
    }
}
