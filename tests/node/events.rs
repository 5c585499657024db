//! Leases that end and the event stream: what a reader rebuilds equals the ledger.

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use kvc_router::core::ledger::{LedgerEvent, LoadReport};
use kvc_router::core::residency::{Change, Residency};
use kvc_router::core::types::Mode;
use kvc_router::node::Node;
use kvc_router::wire::admit::{AdmitAnswer, LeaseCall};
use kvc_router::wire::events::{Decoder, NodeEvent};
use kvc_router::wire::info::KvRole;

use super::world::*;

/// A gateway's view of a node.
struct Mirror {
    body: Incoming,
    decoder: Decoder,
    epoch: u64,
    seq: u64,
    residency: Residency,
    ended: Vec<String>,
    load: LoadReport,
    snapshots: u32,
}

impl Mirror {
    async fn open(node: &Node, query: &str) -> Self {
        let uri = format!("{}/kvc/events{query}", node.url());
        let response =
            client().request(Request::get(uri).body(Full::<Bytes>::default()).unwrap()).await.unwrap();
        assert_eq!(response.status(), 200);
        Self {
            body: response.into_body(),
            decoder: Decoder::default(),
            epoch: 0,
            seq: 0,
            residency: Residency::default(),
            ended: Vec::new(),
            load: LoadReport::default(),
            snapshots: 0,
        }
    }

    /// Reads on until a load has come and everything up to `seq` is there.
    async fn read_to(&mut self, seq: u64) {
        loop {
            while let Some(message) = self.decoder.next_message().unwrap() {
                let load = matches!(message.event, NodeEvent::Load(_));
                self.epoch = message.epoch;
                match message.event {
                    NodeEvent::Snapshot(snapshot) => {
                        self.snapshots += 1;
                        self.residency = Residency::default();
                        for (session, tokens, appended) in snapshot.sessions {
                            self.residency.set(&Change { session, keep: 0, appended, tokens });
                        }
                        self.seq = message.seq;
                    }
                    NodeEvent::Changes(changes) => {
                        assert_eq!(message.seq, self.seq + 1, "a gap");
                        self.seq = message.seq;
                        for change in changes {
                            match change {
                                LedgerEvent::Held(change) => drop(self.residency.set(&change)),
                                LedgerEvent::LeaseEnded { request_id } => self.ended.push(request_id),
                                LedgerEvent::Freed(_)
                                | LedgerEvent::BackedUp(_)
                                | LedgerEvent::BackupDropped(_) => {}
                            }
                        }
                    }
                    NodeEvent::Load(load) => {
                        assert_eq!(message.seq, self.seq);
                        self.load = load;
                    }
                }
                if load && self.seq >= seq {
                    return;
                }
            }
            let frame = self.body.frame().await.expect("the stream ended").unwrap();
            self.decoder.push(&frame.into_data().unwrap());
        }
    }

    fn equals(&self, node: &Node) {
        node.engine().with(|s, _| {
            let truth = s.ledger.residency();
            assert_eq!(self.residency.sessions().len(), truth.sessions().len());
            for (session, held) in truth.sessions() {
                assert_eq!(self.residency.get(session), Some(held));
            }
            assert_eq!(self.residency.blocks(), truth.blocks());
        });
    }
}

fn seq(node: &Node) -> u64 {
    node.engine().with(|s, _| s.log.seq())
}

#[tokio::test]
async fn snapshot_changes_and_resume_rebuild_the_ledger() {
    let mut config = config("d", KvRole::Decode);
    config.k_d = 24 * 120;
    let d = Node::start(config).await.unwrap();
    let chats: Vec<Chat> = (0..6).map(|i| Chat::new(words(&format!("c{i}"), 500))).collect();
    turn(&d, None, "t0", "s0", 0, &chats[0]).await;
    turn(&d, None, "t1", "s1", 0, &chats[1]).await;

    let mut mirror = Mirror::open(&d, "").await;
    mirror.read_to(seq(&d)).await;
    assert_eq!((mirror.snapshots, mirror.epoch), (1, d.info().epoch));
    mirror.equals(&d);
    for (i, chat) in chats.iter().enumerate().take(5).skip(2) {
        turn(&d, None, &format!("t{i}"), &format!("s{i}"), 0, chat).await;
    }
    mirror.read_to(seq(&d)).await;
    mirror.equals(&d);
    assert_eq!(mirror.ended, ["t2", "t3", "t4"]);
    assert!(mirror.load.used > 0 && mirror.load.k_d == 24 * 120 && mirror.load.running == 0);
    assert!(d.engine().with(|s, _| s.ledger.evicted().count) > 0);

    // Where it was: no snapshot, only what came since.
    let query = format!("?epoch={}&after={}", mirror.epoch, mirror.seq);
    turn(&d, None, "t5", "s5", 0, &chats[5]).await;
    let mut again = Mirror { snapshots: 0, ..Mirror::open(&d, &query).await };
    (again.seq, again.residency) = (mirror.seq, mirror.residency.clone());
    again.read_to(seq(&d)).await;
    assert_eq!(again.snapshots, 0);
    again.equals(&d);

    // Another epoch, or a place the log never was at: from the start.
    for query in
        [format!("?epoch={}&after=1", d.info().epoch ^ 1), format!("?epoch={}&after=9999", d.info().epoch)]
    {
        let mut mirror = Mirror::open(&d, &query).await;
        mirror.read_to(seq(&d)).await;
        assert_eq!(mirror.snapshots, 1);
        mirror.equals(&d);
    }
    assert_eq!(get(&d, "/kvc/events?after=x").await.status, 400);
}

#[tokio::test]
async fn a_granted_lease_expires_and_is_reported() {
    let mut config = config("d", KvRole::Decode);
    config.options.lease_ms = 30;
    let d = Node::start(config).await.unwrap();
    let mut mirror = Mirror::open(&d, "").await;
    mirror.read_to(0).await;
    let chat = Chat::new(words("lease", 200));
    granted(&admit(&d, "t", "s", 0, &chat).await);
    mirror.read_to(1).await;
    assert_eq!((mirror.ended, mirror.load.used), (vec!["t".to_owned()], 0));
    let plan = leased(&d, "t", "s", Mode::Seed, 0, false);
    assert_eq!(planned(&d, &plan, chat.body(false)).await.status, 409);
    at_rest(&d).await;
}

#[tokio::test]
async fn lease_calls_and_idempotent_admits() {
    let d = decode().await;
    let mut chat = Chat::new(words("calls", 200));
    let call = |request_id: &str, epoch| {
        serde_json::to_vec(&LeaseCall { request_id: request_id.into(), epoch }).unwrap()
    };
    let epoch = d.info().epoch;
    let first = admit(&d, "t", "s", 0, &chat).await;
    let AdmitAnswer::Admitted { lease, .. } = &first else { panic!("{first:?}") };
    assert_eq!((lease.epoch, &*lease.request_id), (epoch, "t"));
    assert_eq!(granted(&admit(&d, "t", "s", 0, &chat).await), granted(&first));
    assert_eq!(d.engine().with(|s, _| s.ledger.leases()), 1);
    let known =
        async |path: &str, body| post(&d, path, "application/json", body).await.json()["known"].clone();
    assert_eq!(known("/kvc/leases/renew", call("t", epoch)).await, true);
    assert_eq!(known("/kvc/leases/release", call("t", epoch ^ 1)).await, false);
    assert_eq!(known("/kvc/leases/release", call("t", epoch)).await, true);
    assert_eq!(known("/kvc/leases/release", call("t", epoch)).await, false);
    assert_eq!(admit(&d, "t", "s", 0, &chat).await, AdmitAnswer::Stale);

    // The short form names the known prefix by its last hash.
    let (_, answer) = turn(&d, None, "t0", "s", 0, &chat).await;
    chat.say("assistant", answer.text()).say("user", "go on");
    assert_eq!(granted(&admit_known(&d, "t1", "s", 1, &chat, 8).await).0, Mode::Direct);
    assert_eq!(admit_known(&d, "t2", "unknown", 1, &chat, 8).await, AdmitAnswer::Resend);
    let hashes: Vec<u64> = chat.chain().iter().map(|h| h.0).collect();
    let curl = serde_json::json!({"request_id": "t3", "session": "s", "turn": 1, "input_len": chat.tokens(),
        "append_len": 10, "prefix_hashes": hashes});
    let answer = post(&d, "/admit_direct_append", "application/json", curl.to_string()).await;
    assert_eq!(
        (answer.json()["answer"].as_str(), answer.json()["mode"].as_str()),
        (Some("admitted"), Some("direct"))
    );
    // `input_len` is an estimate: a chain that is longer is believed.
    let long =
        serde_json::json!({"request_id": "t4", "session": "new", "input_len": 1, "prefix_hashes": [1, 2]});
    let answer = post(&d, "/admit_direct_append", "application/json", long.to_string()).await;
    assert_eq!(answer.json()["terms"]["input_len"].as_u64(), Some(2 * u64::from(d.info().block_tokens)));
}
