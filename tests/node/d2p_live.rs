//! D→P through a gateway: sessions that no pool can hold together come back from the P's memory.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use kvc_router::core::options::D2pTrigger;
use kvc_router::node::Node;
use kvc_router::settings::Layers;
use kvc_router::{Router, RouterHandle, Settings};

use super::d2p::{keeping, pushed, pushing, start};
use super::world::*;

struct Fleet {
    p: Vec<Node>,
    d: Vec<Node>,
    router: RouterHandle,
    gateway: String,
    server: actix_web::rt::task::JoinHandle<std::io::Result<()>>,
}

impl Fleet {
    /// Two D of 110 blocks, and a P for each tier size.
    async fn new(trigger: &str, tiers: &[u64], flags: &[(&str, &str)]) -> Self {
        let word: D2pTrigger = serde_json::from_value(trigger.into()).unwrap();
        let (mut p, mut d) = (Vec::new(), Vec::new());
        for (i, blocks) in tiers.iter().enumerate() {
            let mut config = keeping(*blocks);
            (config.name, config.k_d) = (format!("p{i}"), 24 * 90);
            p.push(start(config).await);
        }
        for i in 0..2 {
            let mut config = pushing(&format!("d{i}"), 110, word);
            config.limits.sync_patience = Duration::from_millis(500);
            // What is missing of these short prompts counts as a large append.
            config.options.tau_append = 240;
            d.push(start(config).await);
        }
        let urls = |nodes: &[Node]| nodes.iter().map(Node::url).collect::<Vec<_>>().join(",");
        let mut all = vec![
            ("fleet.prefill".to_owned(), urls(&p)),
            ("fleet.decode".to_owned(), urls(&d)),
            ("http.listen".to_owned(), "127.0.0.1:0".to_owned()),
            ("http.workers".to_owned(), "1".to_owned()),
            ("algorithm.d2p_trigger".to_owned(), trigger.to_owned()),
            ("algorithm.tau_append".to_owned(), "240".to_owned()),
        ];
        all.extend(flags.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
        let settings = Settings::load(&Layers { flags: all, ..Layers::default() }).unwrap().settings;
        let router = Router::start(&settings).await.unwrap();
        let serving = router.serve().unwrap();
        let gateway = format!("http://{}", serving.addrs[0]);
        let server = actix_web::rt::spawn(serving.server);
        assert!(router.turns().all_up(Duration::from_secs(10)).await);
        Self { p, d, router, gateway, server }
    }

    async fn ask(&self, session: &str, chat: &Chat) -> Answer {
        let request = Request::post(format!("{}/v1/chat/completions", self.gateway))
            .header("content-type", "application/json")
            .header("x-session-id", session);
        send(request.body(Full::new(Bytes::from(chat.body(true)))).unwrap()).await
    }

    /// `sessions` conversations take turns; returns how often each reason was given.
    async fn play(&self, sessions: &mut [(String, Chat)], rounds: usize) -> HashMap<String, u32> {
        let mut reasons = HashMap::new();
        for round in 0..rounds {
            for (name, chat) in sessions.iter_mut() {
                let answer = self.ask(name, chat).await;
                let text = answer.text();
                assert_eq!(text, chat.reference(), "{name} in round {round}");
                let reason = answer.headers["x-kvc-reason"].to_str().unwrap().to_owned();
                *reasons.entry(reason).or_insert(0) += 1;
                chat.say("assistant", text).say("user", words("go on", 20));
                for d in &self.d {
                    pushed(d).await;
                }
                // The mirrors hear of it.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        reasons
    }

    async fn stop(self) {
        for node in self.d.iter().chain(&self.p) {
            at_rest(node).await;
        }
        self.server.abort();
        self.router.stop().await;
    }
}

fn sessions(n: usize) -> Vec<(String, Chat)> {
    (0..n)
        .map(|i| {
            let chat = Chat::new(words(&format!("session {i}"), 1000));
            (format!("s{i}"), chat)
        })
        .collect()
}

#[actix_web::test]
async fn evicted_sessions_are_restored_and_say_so() {
    let fleet = Fleet::new("evict", &[1000], &[]).await;
    let reasons = fleet.play(&mut sessions(6), 3).await;
    let figures = fleet.router.turns().d2p();
    assert!(reasons.get("restore").is_some_and(|n| *n >= 6), "{reasons:?}, {figures:?}");
    assert_eq!(u64::from(reasons["restore"] + reasons.get("backup").unwrap_or(&0)), figures.backup_hits);
    assert_eq!((figures.theorem4_violations, figures.beta_violations), (0, 0), "{figures:?}");
    assert!(figures.synced_before_next_turn_pct > 99.0, "{figures:?}");
    fleet.stop().await;
}

#[actix_web::test]
async fn every_trigger_and_policy_gives_the_same_texts() {
    for (trigger, policy) in
        [("commit", "last_p"), ("both", "broadcast"), ("evict", "round_robin"), ("off", "last_p")]
    {
        let flags = [("algorithm.d2p_sync_target_policy", policy)];
        let fleet = Fleet::new(trigger, &[1000, 1000], &flags).await;
        let reasons = fleet.play(&mut sessions(6), 3).await;
        let figures = fleet.router.turns().d2p();
        assert_eq!(figures.theorem4_violations, 0);
        // Without sync a P may still resume from its own cache (`backup`), but nothing is restored.
        assert_eq!(reasons.contains_key("restore"), trigger != "off", "{trigger}: {reasons:?} {figures:?}");
        fleet.stop().await;
    }
}

/// A tier far too small: backups are dropped all the time, the monitor sees it, the texts stay right.
#[actix_web::test]
async fn a_tier_that_is_too_small_costs_hits_only() {
    let fleet = Fleet::new("both", &[40], &[("algorithm.d2p_staleness_budget_tokens", "240")]).await;
    fleet.play(&mut sessions(6), 3).await;
    let figures = fleet.router.turns().d2p();
    assert!(figures.beta_violations > 0, "{figures:?}");
    assert_eq!(figures.theorem4_violations, 0);
    fleet.stop().await;
}

/// P dies with all backups: the turns that counted on it take the next rung within the same request.
#[actix_web::test]
async fn a_p_that_dies_with_its_backups_costs_no_turn() {
    let mut fleet = Fleet::new("evict", &[1000], &[]).await;
    let mut all = sessions(6);
    fleet.play(&mut all, 1).await;
    fleet.p.pop().unwrap().stop().await;
    let reasons = fleet.play(&mut all, 2).await;
    assert_eq!(reasons.values().sum::<u32>(), 12);
    fleet.stop().await;
}

/// Many agents at once over small pools: whatever is restored, dropped or pushed meanwhile, every text is right.
#[actix_web::test]
async fn a_crowd_on_small_pools_gets_the_right_texts() {
    let fleet = Fleet::new("both", &[120, 120], &[]).await;
    let crowd = sessions(10).into_iter().map(async |(name, mut chat)| {
        let mut served = 0;
        for _ in 0..4 {
            let answer = fleet.ask(&name, &chat).await;
            if answer.status != 200 {
                continue;
            }
            let text = answer.text();
            assert_eq!(text, chat.reference(), "{name}");
            chat.say("assistant", text).say("user", words("go on", 20));
            served += 1;
        }
        served
    });
    let served: u32 = futures_util::future::join_all(crowd).await.into_iter().sum();
    assert!(served >= 30, "{served}");
    for d in &fleet.d {
        pushed(d).await;
    }
    fleet.stop().await;
}
