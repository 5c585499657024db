//! D→P as the router sees it: targets, offers, rungs, and what happens when a backup is not what it was.

use super::sim::{BLOCK, Lab, chain, request, settle};
use crate::actors::api::{DispatchPlan, Failure};
use crate::core::options::{D2pTarget, D2pTrigger, Options};
use crate::core::types::{Mode, Rung, SessionId, WorkerId};
use crate::wire::plan::{Report, SyncTarget};

const K: u64 = 200_000;

fn targets(plan: &DispatchPlan) -> Vec<&str> {
    plan.sync.iter().map(|target| &*target.to).collect()
}

/// A session of 3000 blocks whose D dropped all but `keep`, with `backed` of the rest at `p`.
async fn lost(lab: &Lab, p: &str, keep: u32, backed: std::ops::Range<usize>) -> DispatchPlan {
    let plan = lab.turn(request("s", 1, 0, 3000)).await;
    lab.node(&plan.decode.name).with(|ledger, _| {
        let s = SessionId::new("s");
        if keep == 0 { ledger.end_session(&s) } else { ledger.cut(&s, keep as usize) }
    });
    // P's own pool forgets what it computed, so that only the backup counts.
    lab.node(p).with(|ledger, _| ledger.end_session(&SessionId::new("s")));
    if !backed.is_empty() {
        lab.node(p).back_up(&chain(1, 3001)[backed]);
    }
    settle().await;
    plan
}

#[tokio::test(start_paused = true)]
async fn a_session_that_lost_residency_is_restored_without_ps_queue() {
    let lab = Lab::start(Options::production(), 2, 2, K).await;
    lost(&lab, "p1", 0, 0..3001).await;
    let mut back = request("s", 1, 1, 3010);
    back.append_len = 9 * BLOCK;
    let grant = lab.router.route(back.clone()).await.unwrap();
    let plan = grant.plan.clone();
    assert_eq!((plan.mode, plan.rung, plan.restore_blocks), (Mode::Reseed, Rung::Restore, 3001));
    assert_eq!(plan.prefill.as_ref().map(|p| &*p.name), Some("p1"));
    let backlog: u64 = lab.router.workers().await.iter().map(|w| w.backlog_tokens).sum();
    assert_eq!(backlog, 0);
    let report = Report { transferred: 3001 * BLOCK, computed: 9 * BLOCK, ..Report::default() };
    grant.reported(report);
    assert!(lab.serve(&plan, &back, 1));
    grant.finished(Default::default());
    lab.assert_clean().await;
    let figures = lab.router.d2p();
    assert_eq!((figures.reseeds, figures.backup_hits, figures.beta_violations), (1, 1, 0));
    assert_eq!((figures.synced_before_next_turn_pct, figures.theorem4_violations), (100.0, 0));
}

/// The D kept the head: only what is behind it is restored.
#[tokio::test(start_paused = true)]
async fn the_run_right_behind_the_kept_head_is_restored() {
    let lab = Lab::start(Options::production(), 1, 1, K).await;
    lost(&lab, "p0", 1000, 900..3001).await;
    let mut back = request("s", 1, 1, 3010);
    back.append_len = 9 * BLOCK;
    let plan = lab.turn(back).await;
    assert_eq!((plan.rung, plan.reuse_blocks, plan.restore_blocks), (Rung::Restore, 1000, 2001));
    lab.assert_clean().await;
}

/// Beyond β a backup does not count, and the monitor says so.
#[tokio::test(start_paused = true)]
async fn a_backup_over_beta_is_not_counted_on() {
    let lab = Lab::start(Options::production(), 1, 2, K).await;
    lost(&lab, "p0", 0, 0..2500).await;
    let mut back = request("s", 1, 1, 3010);
    back.append_len = 9 * BLOCK;
    let plan = lab.turn(back).await;
    assert_ne!(plan.rung, Rung::Restore);
    let figures = lab.router.d2p();
    assert_eq!((figures.beta_violations, figures.backup_hits), (1, 0));
    assert!(figures.staleness_p50 > 4096 && figures.synced_before_next_turn_pct < 100.0, "{figures:?}");
    lab.assert_clean().await;
}

/// The gauge moves while the session rests: nobody has to come back for it.
#[tokio::test(start_paused = true)]
async fn a_session_over_beta_is_counted_while_it_rests() {
    // β in blocks of 24: what the P lacks of 3001 blocks, and whether that is over 4096 tokens.
    for (backed, over) in [(0..3001, 0), (0..2840, 0), (0..2800, 1), (0..0, 1)] {
        let lab = Lab::start(Options::production(), 1, 2, K).await;
        let before = lost(&lab, "p0", 0, backed.clone()).await;
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        assert_eq!(lab.router.d2p().over_budget, over, "{backed:?}");
        assert_eq!(lab.router.d2p().beta_violations, 0, "it has not come back");
        lab.turn(request("s", 1, 1, 3010)).await;
        settle().await;
        assert_eq!(lab.router.d2p().over_budget, 0, "it is resident again");
        // A D that starts anew has lost all at once.
        lab.node("p0").drop_backups();
        lab.node("p0").with(|ledger, _| ledger.end_session(&SessionId::new("s")));
        for d in ["d0", "d1"] {
            lab.node(d).restart();
        }
        tokio::time::sleep(std::time::Duration::from_secs(20)).await;
        assert_eq!(lab.router.d2p().over_budget, 1, "{}", before.decode.name);
        lab.assert_clean().await;
    }
}

/// The restore fails (P dropped the backup meanwhile): the same request takes the next rung.
#[tokio::test(start_paused = true)]
async fn a_failed_restore_falls_back_one_rung() {
    for failure in [Failure::PlanMismatch, Failure::PrefillUnreachable] {
        let lab = Lab::start(Options::production(), 1, 2, K).await;
        lost(&lab, "p0", 0, 0..3001).await;
        let mut back = request("s", 1, 1, 3010);
        back.append_len = 9 * BLOCK;
        let grant = lab.router.route(back.clone()).await.unwrap();
        assert_eq!(grant.plan.rung, Rung::Restore);
        let grant = grant.failed(failure).await.unwrap();
        assert_ne!(grant.plan.rung, Rung::Restore);
        assert_eq!((grant.plan.mode, grant.plan.replaced, grant.plan.restore_blocks), (Mode::Reseed, 1, 0));
        assert!(lab.serve(&grant.plan, &back, 1));
        grant.finished(Default::default());
        lab.assert_clean().await;
    }
}

/// The mirror hears of a drop: the next turn is not offered what is gone.
#[tokio::test(start_paused = true)]
async fn dropped_backups_are_forgotten_and_a_new_snapshot_knows_them() {
    let lab = Lab::start(Options::production(), 1, 1, K).await;
    lost(&lab, "p0", 0, 0..3001).await;
    let held = |w: &crate::actors::worker::WorkerState| (w.name == "p0").then_some(w.backup_blocks);
    assert_eq!(lab.router.workers().await.iter().find_map(held), Some(3001));
    lab.node("p0").faults(|f| f.down = true);
    lab.node("p0").faults(|f| f.down = false);
    tokio::time::sleep(std::time::Duration::from_secs(5)).await;
    assert_eq!(lab.router.workers().await.iter().find_map(held), Some(3001));
    lab.node("p0").drop_backups();
    settle().await;
    assert_eq!(lab.router.workers().await.iter().find_map(held), Some(0));
    assert_ne!(lab.turn(request("s", 1, 1, 3010)).await.rung, Rung::Restore);
}

#[tokio::test(start_paused = true)]
async fn target_policies() {
    let policy = |d2p_sync_target_policy| Options { d2p_sync_target_policy, ..Options::production() };
    let lab = Lab::start(policy(D2pTarget::LastP), 3, 1, K).await;
    let first = lab.turn(request("s", 1, 0, 500)).await;
    let p = first.prefill.as_ref().unwrap().name.clone();
    for turn in 1..3 {
        let plan = lab.turn(request("s", 1, turn, 500 + turn as usize)).await;
        assert_eq!(targets(&plan), [format!("{p}:22000")]);
    }
    let lab = Lab::start(policy(D2pTarget::Broadcast), 3, 1, K).await;
    assert_eq!(targets(&lab.turn(request("s", 1, 0, 500)).await).len(), 3);
    let lab = Lab::start(policy(D2pTarget::RoundRobin), 2, 1, K).await;
    let (a, b) = (lab.turn(request("s", 1, 0, 500)).await, lab.turn(request("s", 1, 1, 501)).await);
    assert_ne!(targets(&a), targets(&b));
    let off = Options { d2p_trigger: D2pTrigger::Off, ..Options::production() };
    let lab = Lab::start(off, 1, 1, K).await;
    assert!(lab.turn(request("s", 1, 0, 500)).await.sync.is_empty());
    let mut side = request("side", 1, 0, 50);
    side.one_shot = true;
    let lab = Lab::start(Options::production(), 1, 1, K).await;
    assert!(lab.turn(side).await.sync.is_empty());
}

/// What the target holds of the prompt is said, so that a commit pushes only what is behind it.
#[tokio::test(start_paused = true)]
async fn a_target_is_told_with_what_it_holds() {
    let options = Options { d2p_trigger: D2pTrigger::Commit, ..Options::production() };
    let lab = Lab::start(options, 1, 1, K).await;
    lab.node("p0").back_up(&chain(1, 40));
    settle().await;
    let mut first = request("s", 1, 0, 60);
    first.append_len = 60 * BLOCK;
    let plan = lab.turn(first).await;
    assert_eq!(plan.sync, [SyncTarget { to: "p0:22000".into(), held: 40 }]);
}

/// A decision with a backup in it replays to the same decision.
#[tokio::test(start_paused = true)]
async fn a_restore_is_explained() {
    let lab = Lab::start(Options::production(), 2, 2, K).await;
    lost(&lab, "p1", 0, 0..3001).await;
    let mut back = request("s", 1, 1, 3010);
    (back.append_len, back.explain) = (9 * BLOCK, true);
    let grant = lab.router.route(back).await.unwrap();
    assert_eq!(grant.plan.prefill.as_ref().map(|p| p.id), Some(WorkerId(3)));
    let record = grant.record.clone().unwrap();
    assert_eq!(record.expect.as_ref().unwrap().outcome.rung, Some(Rung::Restore));
    let (text, met) = crate::explain::run(&serde_json::to_string(&[record]).unwrap()).unwrap();
    assert!(met, "{text}");
}
