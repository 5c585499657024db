//! Simulated turns per second of the replay lab, one core.

use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvc_router::replay::policy::Policy;
use kvc_router::replay::settings::Setting;
use kvc_router::replay::sim::{self, Control};
use kvc_router::replay::trace::Trace;

fn replay(c: &mut Criterion) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/sample.sessions.jsonl.gz");
    let Ok(mut trace) = Trace::read(&[file]) else { return };
    // Eight copies under other names: the load of 52 live sessions.
    for copy in 1..8 {
        let sessions: Vec<_> = trace.sessions[..8].to_vec();
        for mut session in sessions {
            session.name = format!("{}-{copy}", session.name);
            session.family ^= copy;
            trace.sessions.push(session);
        }
    }
    let mut group = c.benchmark_group("replay");
    group.sample_size(20);
    for kv_tokens in [92_104, 553_000] {
        let setting = Setting { kv_tokens, ..Setting::default() };
        for name in ["kvc", "kvc-fused", "dp-lpwl"] {
            let Some(policy) = Policy::named(name) else { continue };
            let Some(run) = sim::run(&trace, &setting, policy, 42, &Control::default()) else { continue };
            group.throughput(Throughput::Elements(run.turns as u64));
            group.bench_function(format!("{name}/{kv_tokens}"), |b| {
                b.iter(|| black_box(sim::run(&trace, &setting, policy, 42, &Control::default())));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, replay);
criterion_main!(benches);
