//! D→P over real sockets: what a D drops or commits goes to a P, and comes back to any D, byte for byte.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use kvc_router::core::options::D2pTrigger;
use kvc_router::core::types::{Mode, SessionId};
use kvc_router::node::{Node, NodeConfig};
use kvc_router::wire::info::KvRole;
use kvc_router::wire::plan::{Plan, Pull, Push, SyncTarget};

use super::world::*;

/// A D of `blocks` blocks that pushes.
pub fn pushing(name: &str, blocks: u64, trigger: D2pTrigger) -> NodeConfig {
    let mut config = config(name, KvRole::Decode);
    config.roles.insert(KvRole::DecodeBackupSender);
    config.k_d = 24 * blocks;
    config.options.d2p_trigger = trigger;
    config
}

/// A P that takes `blocks` blocks of backups.
pub fn keeping(blocks: u64) -> NodeConfig {
    let mut config = config("p", KvRole::Prefill);
    config.roles.insert(KvRole::PrefillBackupReceiver);
    config.d2p_host_tokens = Some(24 * blocks);
    config
}

pub async fn start(config: NodeConfig) -> Node {
    Node::start(config).await.unwrap()
}

/// The plan with the P a session's KV goes to.
pub fn synced(plan: Plan, p: &Node, held: u32) -> Plan {
    match plan {
        Plan::Decode { request_id, session, mode, lease_epoch, reuse_blocks, pull, .. } => {
            let sync = vec![SyncTarget { to: p.d2p_addr().unwrap().to_string(), held }];
            Plan::Decode { request_id, session, mode, lease_epoch, reuse_blocks, pull, sync }
        }
        other => other,
    }
}

/// A turn on D alone that tells it where to push.
pub async fn local(d: &Node, p: &Node, id: &str, session: &str, chat: &Chat) -> Answer {
    let (mode, reuse) = granted(&admit(d, id, session, 1, chat).await);
    planned(d, &synced(leased(d, id, session, mode, reuse, false), p, 0), chat.body(true)).await
}

/// Waits until `d` has nothing left to push.
pub async fn pushed(d: &Node) {
    let counters = &d.engine().sync.counters;
    for _ in 0..2000 {
        let done = counters.stored.load(Relaxed) + counters.failed.load(Relaxed);
        let done = done + counters.replaced.load(Relaxed);
        if d.engine().sync.waiting() == 0 && done == counters.issued.load(Relaxed) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("pushes never end: {counters:?}");
}

/// Both legs of a restore of `blocks` blocks behind what D holds.
pub async fn restore(
    d: &Node,
    p: &Node,
    id: &str,
    session: &str,
    chat: &Chat,
    blocks: u32,
) -> (Answer, Answer) {
    let (mode, reuse) = granted(&admit(d, id, session, 1, chat).await);
    let plan = Plan::Decode {
        request_id: id.into(),
        session: Some(SessionId::new(session)),
        mode,
        lease_epoch: Some(d.info().epoch),
        reuse_blocks: reuse,
        pull: Some(Pull { transfer_id: id.into(), from_block: reuse, blocks: Some(blocks) }),
        sync: Vec::new(),
    };
    let send = Plan::Restore {
        request_id: id.into(),
        session: SessionId::new(session),
        push: Push { transfer_id: id.into(), to: d.kv_addr().unwrap().to_string(), from_block: reuse },
        blocks,
    };
    tokio::join!(planned(d, &plan, chat.body(true)), planned(p, &send, chat.body(true)))
}

/// How many blocks of a chat, from `from` on, `p`'s tier holds without a hole.
pub fn kept(p: &Node, chat: &Chat, from: usize) -> usize {
    let chain = chat.chain();
    p.engine().with(|s, _| chain[from..].iter().take_while(|b| s.backups.tier.contains(**b)).count())
}

#[tokio::test]
async fn what_a_d_drops_is_restored_to_another_d() {
    let (p, d, other) = (
        start(keeping(1000)).await,
        start(pushing("d", 60, D2pTrigger::Evict)).await,
        start(pushing("e", 60, D2pTrigger::Evict)).await,
    );
    let mut chat = Chat::new(words("mine", 800));
    let answer = local(&d, &p, "t0", "s", &chat).await;
    assert_eq!(answer.text(), chat.reference());
    chat.say("assistant", answer.text());
    // Another session needs the room.
    let large = Chat::new(words("large", 1200));
    assert_eq!(local(&d, &p, "t1", "other", &large).await.text(), large.reference());
    // And then for the rest.
    d.engine().with(|s, _| s.ledger.end_session(&SessionId::new("s")));
    pushed(&d).await;
    let counters = &d.engine().sync.counters;
    assert!(counters.blocks.load(Relaxed) >= 20, "{counters:?}");
    let backed = kept(&p, &chat, 0);
    assert!(backed >= 33, "{backed} blocks of {}", chat.chain().len());

    chat.say("user", words("more", 100));
    let (answer, sent) = restore(&other, &p, "t2", "s", &chat, backed as u32).await;
    assert_eq!((sent.status.as_u16(), answer.text()), (200, chat.reference()));
    let report = answer.report();
    assert_eq!((report.reused, report.transferred), (0, backed as u64 * 24));
    assert_eq!(report.transferred + report.computed, answer.usage().0);
    assert_eq!(answer.usage().2, report.transferred);
    // P computed nothing, and its pool is as empty as before.
    assert_eq!(p.engine().with(|s, _| (s.pool.used(), s.queued_tokens)), (0, 0));
    for node in [&p, &d, &other] {
        at_rest(node).await;
    }
}

/// D keeps the head of a session and gets its dropped tail back.
#[tokio::test]
async fn a_tail_is_restored_behind_a_kept_head() {
    let (p, d) = (start(keeping(1000)).await, start(pushing("d", 60, D2pTrigger::Evict)).await);
    let mut chat = Chat::new(words("mine", 800));
    let first = local(&d, &p, "t0", "s", &chat).await.text();
    chat.say("assistant", first).say("user", "go on");
    let small = Chat::new(words("small", 600));
    let _ = local(&d, &p, "t1", "other", &small).await.text();
    pushed(&d).await;
    d.engine().with(|s, _| s.ledger.end_session(&SessionId::new("other")));
    let held = d.engine().with(|s, _| s.ledger.residency().prefix(&chat.chain()));
    assert!(held > 0 && held < 33, "{held}");
    let missing = kept(&p, &chat, held);
    assert!(held + missing >= 33, "{held} + {missing}");
    let (answer, _) = restore(&d, &p, "t2", "s", &chat, missing as u32).await;
    assert_eq!(answer.text(), chat.reference());
    assert_eq!(
        (answer.report().reused, answer.report().transferred),
        (held as u64 * 24, missing as u64 * 24)
    );
    at_rest(&d).await;
    at_rest(&p).await;
}

/// After each turn only what P lacks travels; P's own prefill resumes from it.
#[tokio::test]
async fn commits_are_pushed_once_and_p_resumes_from_them() {
    let (p, d) = (start(keeping(1000)).await, start(pushing("d", 500, D2pTrigger::Commit)).await);
    let mut chat = Chat::new(words("mine", 800));
    let text = local(&d, &p, "t0", "s", &chat).await.text();
    chat.say("assistant", text);
    pushed(&d).await;
    let first = d.engine().sync.counters.blocks.load(Relaxed);
    assert_eq!(kept(&p, &chat, 0), chat.chain().len());
    let shown = get(&d, "/kvc/d2p").await.json();
    assert_eq!(
        (shown["pushed"]["blocks"].as_u64(), shown["pushed"]["waiting"].as_u64()),
        (Some(first), Some(0))
    );
    assert!(get(&p, "/kvc/d2p").await.json()["backup_blocks"].as_u64() >= Some(first));
    chat.say("user", words("more", 200));
    let text = local(&d, &p, "t1", "s", &chat).await.text();
    chat.say("assistant", text).say("user", "and then");
    pushed(&d).await;
    let counters = &d.engine().sync.counters;
    let second = counters.blocks.load(Relaxed) - first;
    assert!(second < first && counters.shared.load(Relaxed) >= first, "{counters:?}");

    let fresh = start(pushing("fresh", 500, D2pTrigger::Commit)).await;
    let (mode, answer) = turn(&fresh, Some(&p), "t2", "s", 2, &chat).await;
    assert_eq!((mode, answer.text()), (Mode::Reseed, chat.reference()));
    let report = answer.report();
    assert!(report.computed + report.computed_remote < 48, "{report:?}");
    for node in [&p, &d, &fresh] {
        at_rest(node).await;
    }
}

/// β = 0: whoever has read the end of an answer finds it backed up.
#[tokio::test]
async fn beta_0_waits_for_the_acknowledgement() {
    let p = start(keeping(1000)).await;
    let mut config = pushing("d", 500, D2pTrigger::Evict);
    config.options.d2p_staleness_budget_tokens = Some(0);
    let d = start(config).await;
    let mut chat = Chat::new(words("mine", 500));
    for i in 0..3 {
        let text = local(&d, &p, &format!("t{i}"), "s", &chat).await.text();
        chat.say("assistant", text);
        assert_eq!(kept(&p, &chat, 0), chat.chain().len());
        chat.say("user", "go on");
    }
    assert_eq!(d.engine().sync.counters.late.load(Relaxed), 0);
    at_rest(&d).await;
    at_rest(&p).await;
}

/// β = ∞ never syncs, and neither does a D without the role or with the trigger off.
#[tokio::test]
async fn nothing_is_pushed_unasked() {
    let p = start(keeping(1000)).await;
    let mut never = pushing("d", 500, D2pTrigger::Both);
    never.options.d2p_staleness_budget_tokens = None;
    let mut without = pushing("d", 500, D2pTrigger::Both);
    without.roles.remove(&KvRole::DecodeBackupSender);
    for config in [never, without, pushing("d", 500, D2pTrigger::Off)] {
        let d = start(config).await;
        let chat = Chat::new(words("mine", 500));
        assert_eq!(local(&d, &p, "t", "s", &chat).await.text(), chat.reference());
        assert_eq!(d.engine().sync.counters.issued.load(Relaxed), 0);
    }
    assert_eq!(p.engine().with(|s, _| s.backups.tier.len()), 0);
}

/// The tier is bounded and tells of what it drops: the events and the snapshot agree with it.
#[tokio::test]
async fn the_tier_is_bounded_and_its_events_say_what_it_holds() {
    let (p, d) = (start(keeping(30)).await, start(pushing("d", 500, D2pTrigger::Commit)).await);
    for i in 0..3 {
        let chat = Chat::new(words(&format!("s{i}"), 400));
        let _ = local(&d, &p, &format!("t{i}"), &format!("s{i}"), &chat).await.text();
        pushed(&d).await;
    }
    assert_eq!(p.engine().with(|s, _| s.backups.tier.len()), 30);
    let (mut held, mut seen) = (std::collections::HashSet::new(), 0);
    for frame in p.engine().with(|s, _| s.log.since(0)).unwrap() {
        let mut decoder = kvc_router::wire::events::Decoder::default();
        decoder.push(&frame);
        let message = decoder.next_message().unwrap().unwrap();
        if let kvc_router::wire::events::NodeEvent::Changes(changes) = message.event {
            for change in changes {
                match change {
                    kvc_router::core::ledger::LedgerEvent::BackedUp(blocks) => held.extend(blocks),
                    kvc_router::core::ledger::LedgerEvent::BackupDropped(blocks) => {
                        blocks.iter().for_each(|b| assert!(held.remove(b)));
                        seen += blocks.len();
                    }
                    _ => {}
                }
            }
        }
    }
    let snapshot: std::collections::HashSet<_> =
        p.engine().with(|s, _| s.snapshot().backups).into_iter().collect();
    assert!(seen > 0);
    assert_eq!(held, snapshot);
    at_rest(&p).await;
}
