//! What a decision costs at 8 and 64 D workers that hold 4,000 blocks each: Algorithm 1 in the core, the same with
//! hash sets and a naive intersection (the baseline), and a whole placement through the actors.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::HashSet;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use futures_core::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _, stream};
use kvc_router::actors::api::{TurnRequest, TurnResult, WorkerRef};
use kvc_router::actors::handle::{TurnRouter, WorkerSpec};
use kvc_router::actors::shared::Config;
use kvc_router::actors::slot::Role;
use kvc_router::actors::transport::{EventStream, Transport, TransportError};
use kvc_router::core::admit::AdmitTerms;
use kvc_router::core::cost::{Backup, CostModel};
use kvc_router::core::ledger::LoadReport;
use kvc_router::core::options::Options;
use kvc_router::core::residency::{Change, Residency, intersection};
use kvc_router::core::route::{Ask, Candidate, SessionState, overlap, route};
use kvc_router::core::types::{BlockHash, Mode, SessionId, WorkerId};
use kvc_router::wire::PROTOCOL;
use kvc_router::wire::admit::{AdmitAnswer, AdmitHead, Lease, LeaseCall};
use kvc_router::wire::events::{NodeEvent, Numbered, Snapshot};
use kvc_router::wire::info::{KvRole, NodeInfo};

const BLOCKS: u64 = 4000;
/// Blocks of a system prompt that every worker holds.
const SHARED: u64 = 620;

/// The prompt of the session that lives on worker `d`.
fn chain(d: u64) -> Vec<BlockHash> {
    let mix = |x: u64| BlockHash(x.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    (0..BLOCKS).map(|i| mix(if i < SHARED { i } else { (d + 1) * 1_000_000 + i })).collect()
}

fn session(d: u64) -> SessionId {
    SessionId::new(format!("bench/{d}"))
}

fn candidate(d: u64, overlap: u32) -> Candidate {
    Candidate {
        id: WorkerId(d as u32),
        overlap,
        resident: if d == 0 { BLOCKS * 24 } else { 0 },
        inflight: 0,
        assigned: 0,
        load: Some(LoadReport { k_d: 400_000, ..LoadReport::default() }),
        pinned_tokens: 0,
        warm: 1.0,
        backup: Backup::default(),
    }
}

fn core(c: &mut Criterion) {
    let (options, cost) = (Options::production(), CostModel::reference());
    let ask = Ask { turn: 5, input_len: BLOCKS * 24, append_len: 700 };
    let state = SessionState { pin: Some(WorkerId(0)), ..SessionState::default() };
    for n in [8u64, 64] {
        let prompt = chain(0);
        let mirrors: Vec<Residency> = (0..n)
            .map(|d| {
                let mut r = Residency::default();
                let appended = chain(d);
                r.set(&Change { session: session(d), keep: 0, appended, tokens: BLOCKS * 24 });
                r
            })
            .collect();
        c.bench_function(&format!("core/route/{n}d"), |b| {
            b.iter(|| {
                let all: Vec<Candidate> = mirrors
                    .iter()
                    .enumerate()
                    .map(|(d, m)| candidate(d as u64, overlap(black_box(&prompt), m, &options)))
                    .collect();
                route(&ask, &state, &[], &all, &[], &options, &cost)
            });
        });
        let sets: Vec<HashSet<BlockHash>> = (0..n).map(|d| chain(d).into_iter().collect()).collect();
        c.bench_function(&format!("baseline/hash-sets/{n}d"), |b| {
            b.iter(|| sets.iter().map(|set| intersection(black_box(&prompt), set)).max());
        });
    }
}

/// Nodes that hold one session each and admit everything at once.
struct Yes;

impl Transport for Yes {
    fn info<'a>(&'a self, at: &'a WorkerRef) -> BoxFuture<'a, Result<NodeInfo, TransportError>> {
        let info = NodeInfo {
            protocol: PROTOCOL,
            name: at.name.to_string(),
            epoch: 1,
            roles: vec![KvRole::Decode],
            model: "bench".into(),
            k_d: 400_000,
            block_tokens: 24,
            kv_bytes_per_token: 64,
            kv_addr: None,
            d2p_addr: None,
        };
        async move { Ok(info) }.boxed()
    }

    fn admit<'a>(
        &'a self,
        _: &'a WorkerRef,
        head: AdmitHead,
        _: &'a [BlockHash],
    ) -> BoxFuture<'a, Result<AdmitAnswer, TransportError>> {
        let lease = Lease { request_id: head.request_id, epoch: 1, tokens: 700, ttl_ms: 60_000 };
        let terms = AdmitTerms::default();
        let reuse_blocks = BLOCKS as u32;
        async move { Ok(AdmitAnswer::Admitted { lease, mode: Mode::Direct, reuse_blocks, terms }) }.boxed()
    }

    fn release<'a>(&'a self, _: &'a WorkerRef, _: LeaseCall) -> BoxFuture<'a, Result<(), TransportError>> {
        async { Ok(()) }.boxed()
    }

    fn events<'a>(&'a self, at: &'a WorkerRef) -> BoxFuture<'a, Result<EventStream, TransportError>> {
        let d = u64::from(at.id.0);
        let load = LoadReport { k_d: 400_000, ..LoadReport::default() };
        let snapshot =
            Snapshot { sessions: vec![(session(d), BLOCKS * 24, chain(d))], load, ..Snapshot::default() };
        let first = Numbered { epoch: 1, seq: 0, event: NodeEvent::Snapshot(snapshot) };
        let load = move || async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Some((Ok(Numbered { epoch: 1, seq: 0, event: NodeEvent::Load(load) }), ()))
        };
        let loads = stream::unfold((), move |()| load());
        async move { Ok(stream::iter([Ok(first)]).chain(loads).boxed()) }.boxed()
    }
}

fn actors(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for n in [8u64, 64] {
        let router = runtime.block_on(async {
            let spec =
                |d| WorkerSpec { name: format!("d{d}"), url: format!("http://d{d}"), role: Role::Decode };
            let workers = (0..n).map(spec).collect();
            let router = TurnRouter::start(Config::default(), workers, Arc::new(Yes)).await.unwrap();
            assert!(router.all_up(Duration::from_secs(30)).await);
            router
        });
        let turn = TurnRequest {
            session: session(0),
            turn: 5,
            chain: chain(0).into(),
            input_len: BLOCKS * 24,
            append_len: 700,
            max_output: Some(256),
            one_shot: false,
            hint: None,
            explain: false,
        };
        c.bench_function(&format!("actors/place-and-finish/{n}d"), |b| {
            b.iter_batched(
                || turn.clone(),
                |turn| {
                    runtime.block_on(async {
                        router.route(turn).await.unwrap().finished(TurnResult::default());
                    });
                },
                BatchSize::SmallInput,
            );
        });
    }
}

criterion_group!(benches, core, actors);
criterion_main!(benches);
