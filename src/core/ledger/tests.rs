use super::*;
use crate::core::options::{Accounting, Eviction};
use proptest::prelude::*;

const BLOCK: Tokens = 24;

fn small(k_blocks: u64) -> Ledger {
    Ledger::new(Options { rho: 1.0, ..Options::production() }, k_blocks * BLOCK, 1)
}

/// The first `n` blocks of the prompt `seed`; prompts share their first block when their seeds share a tenth.
fn chain(seed: u64, n: usize) -> Vec<BlockHash> {
    (0..n as u64).map(|i| BlockHash(if i == 0 { 1_000_000 + seed / 10 } else { seed * 1000 + i })).collect()
}

fn request(id: &str, session: &str, seed: u64, blocks: usize) -> AdmitRequest {
    AdmitRequest {
        request_id: id.into(),
        session: SessionId::new(session),
        turn: 1,
        chain: chain(seed, blocks).into(),
        input_len: blocks as Tokens * BLOCK,
        output_reserve: 0,
    }
}

fn serve(ledger: &mut Ledger, id: &str, session: &str, seed: u64, blocks: usize, now: Millis) -> bool {
    if !matches!(ledger.admit(&request(id, session, seed, blocks), now), AdmitReply::Admitted { .. }) {
        return false;
    }
    ledger.start(id, now).unwrap();
    ledger.commit(id, &chain(seed, blocks), blocks as Tokens * BLOCK, StopKind::Unknown, now);
    audit(ledger);
    true
}

/// Every block accounted for exactly once, every book-keeping field equal to what it is derived from.
fn audit(ledger: &Ledger) {
    let mut refs: HashMap<BlockHash, u32> = HashMap::new();
    for (_, held) in ledger.residency.sessions() {
        held.chain.iter().for_each(|b| *refs.entry(*b).or_insert(0) += 1);
    }
    for lease in ledger.leases.values() {
        lease.chain[lease.pinned_from..lease.reuse].iter().for_each(|b| *refs.entry(*b).or_insert(0) += 1);
        let held = lease.chain[..lease.reuse].iter().all(|b| ledger.residency.contains(*b));
        assert!(held, "a leased block was dropped");
    }
    assert_eq!(ledger.residency.blocks(), refs.len());
    refs.iter().for_each(|(b, n)| assert_eq!(ledger.residency.refs(*b), *n));
    let reserved: usize = ledger.leases.values().filter(|l| l.counts()).map(|l| l.blocks).sum();
    assert_eq!(ledger.reserved_blocks, reserved);
    assert!(ledger.occupied_blocks() <= ledger.pool_blocks(), "over K_d");
    let idle = ledger.residency.sessions().filter(|(s, _)| ledger.usage[*s].leases == 0).count();
    assert_eq!(ledger.idle.len(), idle);
    for (_, session) in &ledger.idle {
        assert!(ledger.residency.get(session).is_some());
    }
    for (session, usage) in &ledger.usage {
        let leases = ledger.leases.values().filter(|l| l.session == *session).count();
        assert_eq!(usage.leases as usize, leases);
    }
}

#[test]
fn a_lease_reserves_until_it_ends() {
    let mut l = small(10);
    let a = l.admit(&request("a", "s1", 10, 6), 0);
    assert!(matches!(a, AdmitReply::Admitted { reserved: 144, reuse_blocks: 0, .. }));
    assert!(matches!(l.admit(&request("b", "s2", 20, 6), 0), AdmitReply::Rejected { .. }));
    assert!(l.release("a", 0));
    assert!(!l.release("a", 0));
    assert!(matches!(l.admit(&request("b2", "s2", 20, 6), 0), AdmitReply::Admitted { .. }));
    audit(&l);
}

/// A4: a reply lost after its effect costs nothing: the retry gets the same lease, once.
#[test]
fn admit_is_idempotent_and_late_duplicates_are_stale() {
    let mut l = small(10);
    let first = l.admit(&request("a", "s", 10, 6), 0);
    assert_eq!(l.admit(&request("a", "s", 10, 6), 5), first);
    assert_eq!(l.leases(), 1);
    l.start("a", 6).unwrap();
    l.commit("a", &chain(10, 6), 144, StopKind::ToolUse, 7);
    assert_eq!(l.admit(&request("a", "s", 10, 6), 8), AdmitReply::Stale);
    assert_eq!(l.leases(), 0);
    audit(&l);
}

/// Who was refused has gone on: a copy of its Admit that arrives when there is room opens no lease.
#[test]
fn a_refusal_is_repeated() {
    let mut l = small(10);
    l.admit(&request("a", "s1", 10, 6), 0);
    let refused = l.admit(&request("b", "s2", 20, 6), 1);
    assert!(matches!(refused, AdmitReply::Rejected { .. }));
    assert!(l.release("a", 2));
    assert_eq!(l.admit(&request("b", "s2", 20, 6), 3), refused);
    assert_eq!(l.leases(), 0);
    // It may still come without a lease, as a Fallback, and ask anew under another id.
    assert!(l.force(&request("b", "s2", 20, 6), 4).is_ok());
    assert!(l.release("b", 5));
    assert!(matches!(l.admit(&request("b2", "s2", 20, 6), 6), AdmitReply::Admitted { .. }));
    audit(&l);
}

/// What is remembered of ended turns is bounded.
#[test]
fn late_messages_are_known_for_a_while() {
    let mut l = small(10);
    for n in 0..70_000u64 {
        l.release(&format!("old {n}"), n / 100);
    }
    assert_eq!((l.settled.len(), l.settled_order.len()), (1 << 16, 1 << 16));
    l.expire(700 + super::lease::LATE_MS);
    assert_eq!((l.settled.len(), l.settled_order.len()), (0, 0));
}

/// `reserve = check` promises no room: a turn that is there and waits for it keeps its lease beyond its lifetime.
#[test]
fn a_lease_does_not_expire_while_its_turn_waits_for_room() {
    let options = Options { reserve: Reserve::Check, eviction: Eviction::None, ..Options::production() };
    let mut l = Ledger::new(options.clone(), 10 * BLOCK, 1);
    for id in ["a", "b"] {
        assert!(matches!(l.admit(&request(id, id, id.len() as u64, 6), 0), AdmitReply::Admitted { .. }));
    }
    assert_eq!(l.start("a", 1), Ok(0));
    assert_eq!(l.start("b", 1), Err(StartError::NoRoom));
    let late = 2 * options.lease_ms;
    l.expire(late);
    assert_eq!((l.leases(), l.start("b", late)), (2, Err(StartError::NoRoom)));
    assert!(l.release("a", late));
    assert!(l.start("b", late).is_ok());
    assert!(l.release("b", late));
    audit(&l);
}

/// A release that overtakes its Admit wins.
#[test]
fn an_admit_after_its_release_is_stale() {
    let mut l = small(10);
    assert!(!l.release("a", 0));
    assert_eq!(l.admit(&request("a", "s", 10, 6), 1), AdmitReply::Stale);
    let later = super::lease::LATE_MS;
    assert!(matches!(l.admit(&request("a", "s", 10, 6), later), AdmitReply::Admitted { .. }));
}

#[test]
fn a_lease_expires_unless_renewed_or_started() {
    let mut l = small(30);
    let ttl = l.options.lease_ms;
    for id in ["a", "b", "c"] {
        l.admit(&request(id, id, 10, 6), 0);
    }
    l.start("b", 1).unwrap();
    l.renew("c", 1000);
    l.expire(ttl);
    assert_eq!((l.start("a", ttl), l.leases()), (Err(StartError::NoLease), 2));
    assert!(l.start("c", ttl).is_ok());
    audit(&l);
}

#[test]
fn eviction_takes_the_tail_of_the_session_least_likely_to_return() {
    assert_eq!(left_after_eviction(Eviction::Blocks), (5, 3, 4));
}

#[test]
fn lru_takes_the_tail_of_the_session_longest_unused() {
    assert_eq!(left_after_eviction(Eviction::Lru), (3, 5, 4));
}

/// Blocks that an older session waiting for a tool, a newer one that has ended its turn, and a third hold that needs
/// two blocks of theirs.
fn left_after_eviction(eviction: Eviction) -> (usize, usize, usize) {
    let mut l = small(12);
    l.options.eviction = eviction;
    assert!(serve(&mut l, "1", "tool", 10, 5, 0));
    assert!(serve(&mut l, "2", "end", 20, 5, 1000));
    // `serve` commits as Unknown; give both a known stop.
    for (id, s, seed, stop, t) in
        [("3", "tool", 10, StopKind::ToolUse, 2000), ("4", "end", 20, StopKind::EndTurn, 3000)]
    {
        l.admit(&request(id, s, seed, 5), t);
        l.start(id, t).unwrap();
        l.commit(id, &chain(seed, 5), 5 * BLOCK, stop, t);
    }
    l.take_events();
    assert!(serve(&mut l, "5", "new", 30, 4, 4000));
    let held = |s: &str| l.residency.get(&SessionId::new(s)).map_or(0, |h| h.chain.len());
    assert_eq!((l.evicted().count, l.evicted().tokens), (1, 2 * BLOCK));
    (held("tool"), held("end"), held("new"))
}

#[test]
fn sessions_with_a_lease_are_never_evicted() {
    let mut l = small(10);
    assert!(serve(&mut l, "1", "a", 10, 6, 0));
    l.admit(&request("run", "a", 10, 7), 1);
    assert!(!serve(&mut l, "2", "b", 20, 4, 2));
    assert!(serve(&mut l, "3", "b", 20, 3, 2));
    audit(&l);
}

/// A rewritten session (compaction) makes room with its own old tail.
#[test]
fn a_rewrite_gives_its_own_tail_first() {
    let mut l = small(10);
    assert!(serve(&mut l, "1", "a", 11, 8, 0));
    assert!(serve(&mut l, "2", "a", 12, 9, 1));
    assert_eq!(l.residency.get(&SessionId::new("a")).unwrap().chain, chain(12, 9));
}

#[test]
fn fallback_is_limited_by_the_pool_not_by_rho() {
    let mut l = Ledger::new(Options { rho: 0.5, ..Options::paper() }, 10 * BLOCK, 1);
    assert!(matches!(l.admit(&request("a", "s", 10, 6), 0), AdmitReply::Rejected { .. }));
    assert_eq!(l.force(&request("f", "s", 10, 6), 0), Ok(0));
    assert_eq!(l.force(&request("g", "t", 20, 6), 0), Err(StartError::NoRoom));
    audit(&l);
    l.release("f", 0);
    assert_eq!(l.force(&request("g", "t", 20, 6), 0), Ok(0));
    audit(&l);
}

/// A forced turn whose answer would not fit beside its prompt gets the room there is, and can start.
#[test]
fn a_forced_turn_near_k_d_fits() {
    let mut l = small(10);
    assert!(serve(&mut l, "1", "other", 20, 6, 0));
    let mut near = request("f", "s", 10, 10);
    near.output_reserve = 5 * BLOCK;
    assert_eq!(l.force(&near, 1), Ok(0));
    audit(&l);
    assert_eq!(l.occupied_blocks(), 10);
    assert!(!l.grow("f", 11));
}

#[test]
fn siblings_survive_each_others_commits() {
    let mut l = small(40);
    assert!(serve(&mut l, "0", "s", 11, 5, 0));
    l.admit(&request("x", "s", 11, 7), 1);
    l.admit(&request("y", "s", 12, 7), 1);
    l.start("x", 1).unwrap();
    l.start("y", 1).unwrap();
    l.commit("y", &chain(12, 8), 8 * BLOCK, StopKind::ToolUse, 2);
    audit(&l);
    l.commit("x", &chain(11, 8), 8 * BLOCK, StopKind::ToolUse, 3);
    audit(&l);
    assert_eq!(l.occupied_blocks(), 8);
}

/// What the outside is told rebuilds what the ledger holds.
fn follow(mirror: &mut Residency, ledger: &mut Ledger) {
    for event in ledger.take_events() {
        if let LedgerEvent::Held(change) = event {
            mirror.set(&change);
        }
    }
    let chains = |r: &Residency| {
        let mut all: Vec<_> = r.sessions().map(|(s, h)| (s.clone(), h.clone())).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    };
    assert_eq!(chains(mirror), chains(&ledger.residency));
}

#[derive(Debug, Clone)]
enum Op {
    Admit { id: u8, session: u8, seed: u64, blocks: usize, output: u64 },
    Start(u8),
    Force { id: u8, session: u8, seed: u64, blocks: usize },
    Grow(u8, usize),
    Commit { id: u8, more: usize, stop: u8 },
    Release(u8),
    End(u8),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let turn = (0u8..12, 0u8..5, 10u64..16, 1usize..14, 0u64..60);
    prop_oneof![
        4 => turn.clone().prop_map(|(id, session, seed, blocks, output)| Op::Admit { id, session, seed, blocks, output }),
        3 => (0u8..12).prop_map(Op::Start),
        1 => turn.prop_map(|(id, session, seed, blocks, _)| Op::Force { id, session, seed, blocks }),
        1 => (0u8..12, 0usize..12).prop_map(|(id, n)| Op::Grow(id, n)),
        3 => (0u8..12, 0usize..3, 0u8..3).prop_map(|(id, more, stop)| Op::Commit { id, more, stop }),
        2 => (0u8..12).prop_map(Op::Release),
        1 => (0u8..5).prop_map(Op::End),
        1 => (0u64..80_000).prop_map(Op::Wait),
    ]
}

fn options(paper: bool, evict: bool, marginal: bool, lease: bool) -> Options {
    let base = if paper { Options::paper() } else { Options::production() };
    Options {
        eviction: if evict { Eviction::Blocks } else { Eviction::None },
        accounting: if marginal { Accounting::Marginal } else { Accounting::Input },
        reserve: if lease { Reserve::Lease } else { Reserve::Check },
        ..base
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Invariant 1 in its true form, and the books, after every step of random histories under every mix of
    /// options: reservations of admitted turns ≤ ρ·K_d at each Admit, physical use ≤ K_d always, no lease or
    /// block lost, leased blocks never dropped, and the event stream rebuilds the state.
    #[test]
    fn books_balance(
        ops in proptest::collection::vec(op(), 1..80),
        paper: bool, evict: bool, marginal: bool, lease: bool, k in 8u64..40,
    ) {
        let o = options(paper, evict, marginal, lease);
        let mut l = Ledger::new(o.clone(), k * BLOCK, 1);
        let mut mirror = Residency::default();
        let mut now = 0;
        let mut generation = [0u32; 12];
        let mut lives: HashMap<u8, (Vec<BlockHash>, usize)> = HashMap::new();
        for op in ops {
            now += 1;
            let name = |id: u8, g: &[u32; 12]| format!("{id}-{}", g[id as usize]);
            match op {
                Op::Admit { id, session, seed, blocks, output } => {
                    let mut r = request(&name(id, &generation), &format!("s{session}"), seed, blocks);
                    r.output_reserve = output;
                    let new = !l.leases.contains_key(&r.request_id);
                    if let AdmitReply::Admitted { .. } = l.admit(&r, now) {
                        if new && marginal && lease {
                            prop_assert!(l.kept_blocks() as Tokens * BLOCK <= o.high_water(k * BLOCK));
                        }
                        lives.entry(id).or_insert((chain(seed, blocks + 3), blocks));
                    }
                }
                Op::Start(id) => { let _ = l.start(&name(id, &generation), now); }
                Op::Force { id, session, seed, blocks } => {
                    let r = request(&name(id, &generation), &format!("s{session}"), seed, blocks);
                    if l.force(&r, now).is_ok() {
                        lives.entry(id).or_insert((chain(seed, blocks + 3), blocks));
                    }
                }
                Op::Grow(id, n) => { l.grow(&name(id, &generation), n); }
                Op::Commit { id, more, stop } => {
                    let known = l.leases.contains_key(&name(id, &generation));
                    if let (true, Some((full, blocks))) = (known, lives.remove(&id)) {
                        if l.start(&name(id, &generation), now).is_ok() {
                            let lease = &l.leases[&name(id, &generation)];
                            let held = (lease.reuse + lease.blocks).min(blocks + more);
                            let stop = [StopKind::ToolUse, StopKind::EndTurn, StopKind::Unknown][stop as usize];
                            l.commit(&name(id, &generation), &full[..held], held as Tokens * BLOCK, stop, now);
                            generation[id as usize] += 1;
                        } else {
                            lives.insert(id, (full, blocks));
                        }
                    }
                }
                Op::Release(id) => {
                    if l.release(&name(id, &generation), now) {
                        lives.remove(&id);
                        generation[id as usize] += 1;
                    }
                }
                Op::End(s) => l.end_session(&SessionId::new(format!("s{s}"))),
                Op::Wait(ms) => {
                    now += ms;
                    l.expire(now);
                    lives.retain(|id, _| l.leases.contains_key(&name(*id, &generation)));
                }
            }
            audit(&l);
            follow(&mut mirror, &mut l);
        }
        // Everything that was ever opened can be closed, and then nothing is reserved.
        let ids: Vec<String> = l.leases.keys().cloned().collect();
        for id in ids { l.release(&id, now); }
        audit(&l);
        prop_assert_eq!((l.leases(), l.reserved_blocks), (0, 0));
    }
}

/// An engine that drops blocks by itself: whoever relied on them is cut, running turns are not.
#[test]
fn lost_blocks_are_lost_for_every_idle_session() {
    let mut ledger = small(100);
    // Prompts 10 and 11 share their first block only.
    assert!(serve(&mut ledger, "1", "a", 10, 8, 1) && serve(&mut ledger, "2", "b", 11, 8, 1));
    assert!(serve(&mut ledger, "3", "c", 10, 6, 1));
    ledger.lost(&[chain(10, 4)[3]].into());
    audit(&ledger);
    let held = |ledger: &Ledger, s: &str| ledger.residency().get(&SessionId::new(s)).map(|h| h.chain.len());
    assert_eq!((held(&ledger, "a"), held(&ledger, "b"), held(&ledger, "c")), (Some(3), Some(8), Some(3)));
    assert!(matches!(ledger.admit(&request("4", "b", 11, 9), 2), AdmitReply::Admitted { .. }));
    ledger.lost(&[chain(10, 1)[0]].into());
    audit(&ledger);
    assert_eq!((held(&ledger, "a"), held(&ledger, "b"), held(&ledger, "c")), (None, Some(8), None));
    ledger.release("4", 3);
    ledger.forget_all();
    audit(&ledger);
    assert_eq!(ledger.occupied_blocks(), 0);
}

#[test]
fn a_pool_that_shrinks_evicts_what_no_turn_stands_on() {
    let mut ledger = small(100);
    assert!(serve(&mut ledger, "1", "a", 10, 40, 1) && serve(&mut ledger, "2", "b", 20, 40, 2));
    assert!(matches!(ledger.admit(&request("3", "b", 20, 45), 3), AdmitReply::Admitted { .. }));
    ledger.resize(50 * BLOCK);
    audit(&ledger);
    assert_eq!(ledger.occupied_blocks(), 50);
    ledger.resize(200 * BLOCK);
    assert_eq!((ledger.pool_blocks(), ledger.occupied_blocks()), (200, 50));
}
