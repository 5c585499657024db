//! A pool that is too small: eviction while turns run, never wrong text, never over K_d.

use kvc_router::node::Node;
use kvc_router::wire::info::KvRole;

use super::world::*;

async fn small(role: KvRole, tokens: u64) -> Node {
    let mut config = config("small", role);
    config.k_d = tokens;
    Node::start(config).await.unwrap()
}

async fn talk(d: &Node, p: Option<&Node>, name: &str, turns: u32) -> u32 {
    let mut chat = Chat::new(words(name, 400));
    let mut evicted = 0;
    for turn in 0..turns {
        let id = format!("{name}-{turn}");
        let answer = match admit(d, &id, name, turn, &chat).await {
            kvc_router::wire::admit::AdmitAnswer::Admitted { mode, reuse_blocks, .. } => {
                let plan = leased(d, &id, name, mode, reuse_blocks, p.is_some());
                let body = chat.body(true);
                match p {
                    None => planned(d, &plan, body).await,
                    Some(p) => legs(d, &plan, p, &prefill_plan(d, &id, name, reuse_blocks), body).await,
                }
            }
            _ => {
                evicted += 1;
                planned(d, &fallback(&id, Some(name)), chat.body(true)).await
            }
        };
        assert_eq!(answer.text(), chat.reference(), "{id}");
        let report = answer.report();
        assert_eq!(report.reused + report.transferred + report.computed, answer.usage().0);
        chat.say("assistant", answer.text()).say("user", words("more", 150));
    }
    evicted
}

#[tokio::test]
async fn sessions_over_k_d_evict_each_other_and_stay_right() {
    let d = small(KvRole::Decode, 24 * 160).await;
    let names: Vec<String> = (0..6).map(|i| format!("s{i}")).collect();
    futures_util::future::join_all(names.iter().map(|name| talk(&d, None, name, 4))).await;
    at_rest(&d).await;
    let evictions = d.engine().with(|s, _| s.ledger.evicted()).count;
    assert!(evictions > 0);
}

#[tokio::test]
async fn small_p_and_small_d_with_transfers() {
    let (p, d) = (small(KvRole::Prefill, 24 * 120).await, small(KvRole::Decode, 24 * 160).await);
    let names: Vec<String> = (0..5).map(|i| format!("s{i}")).collect();
    futures_util::future::join_all(names.iter().map(|name| talk(&d, Some(&p), name, 3))).await;
    at_rest(&d).await;
    at_rest(&p).await;
}

#[tokio::test]
async fn a_prompt_longer_than_the_pool_is_413_and_a_full_pool_429() {
    let d = stuck("d", 24 * 40).await;
    let answer = plain(&d, Chat::new(words("long", 1000)).body(false)).await;
    assert_eq!((answer.status.as_u16(), &*answer.code()), (413, "kvc_prompt_too_large"));

    let mut busy = config("busy", KvRole::Decode);
    busy.k_d = 24 * 40;
    busy.cost.time_scale = 1e-6;
    busy.limits.queue_turns = 0;
    let d = Node::start(busy).await.unwrap();
    let holder = client();
    let first = holder.request(request(&d, &fallback("a", None), Chat::new(words("a", 700)).body(true)));
    let full = async {
        until(&d, |s| s.running() == 1).await;
        plain(&d, Chat::new(words("b", 700)).body(false)).await
    };
    let answer = tokio::select! { _ = first => panic!("the first turn ended"), answer = full => answer };
    assert_eq!((answer.status.as_u16(), &*answer.code()), (429, "kvc_busy"));
    assert_eq!(answer.headers["retry-after"], "1");
    at_rest(&d).await;
}
