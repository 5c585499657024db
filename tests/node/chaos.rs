//! Many sessions on a small pool, with clients that hang up anywhere: whatever happens, the text of every answer
//! that was finished is right, and in the end every slot is accounted for.

use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use kvc_router::node::Node;
use kvc_router::wire::admit::AdmitAnswer;
use kvc_router::wire::info::KvRole;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::world::*;

/// A future that gives up after some polls.
struct Impatient<F> {
    inner: F,
    polls: u32,
}

impl<F: Future + Unpin> Future for Impatient<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.polls == 0 {
            return Poll::Ready(None);
        }
        self.polls -= 1;
        Pin::new(&mut self.inner).poll(cx).map(Some)
    }
}

async fn one(d: &Node, p: Option<&Node>, id: &str, session: &str, turn: u32, chat: &Chat) -> Answer {
    let body = chat.body(true);
    match admit(d, id, session, turn, chat).await {
        AdmitAnswer::Admitted { mode, reuse_blocks, .. } => {
            let plan = leased(d, id, session, mode, reuse_blocks, p.is_some());
            match p {
                None => planned(d, &plan, body).await,
                Some(p) => legs(d, &plan, p, &prefill_plan(d, id, session, reuse_blocks), body).await,
            }
        }
        _ => planned(d, &fallback(id, Some(session)), body).await,
    }
}

/// One agent: goes on with its conversation after each answer, repeats a turn it hung up on.
async fn agent(d: &Node, p: &Node, number: u64) -> (u32, u32) {
    let mut random = SmallRng::seed_from_u64(number);
    let session = format!("s{}", number % 6);
    let mut chat = Chat::new(words(&session, 300));
    let (mut finished, mut left) = (0, 0);
    for attempt in 0..12 {
        let id = format!("{number}-{attempt}");
        let polls = if random.random_bool(0.5) { random.random_range(1..60) } else { u32::MAX };
        let p = random.random_bool(0.5).then_some(p);
        let answer = {
            let turn = pin!(one(d, p, &id, &session, attempt, &chat));
            Impatient { inner: turn, polls }.await
        };
        match answer {
            Some(answer) if answer.status == 200 => {
                assert_eq!(answer.text(), chat.reference(), "{id}");
                let report = answer.report();
                assert_eq!(report.reused + report.transferred + report.computed, answer.usage().0);
                chat.say("assistant", answer.text()).say("user", words("next", random.random_range(1..200)));
                finished += 1;
            }
            // Only for lack of room (a small pool and leases whose clients are gone), or because the machine is so
            // busy that the short lease was over before its turn began.
            Some(answer) => {
                assert!(["kvc_busy", "kvc_plan_mismatch"].contains(&&*answer.code()), "{}", answer.body);
            }
            None => left += 1,
        }
        d.engine().with(|s, _| s.audit()).unwrap();
    }
    (finished, left)
}

#[tokio::test]
async fn clients_that_hang_up_anywhere_leave_nothing() {
    let mut decode = config("d", KvRole::Decode);
    decode.k_d = 24 * 400;
    // Leases of clients that left before they began their turn.
    decode.options.lease_ms = 200;
    decode.cost.time_scale = 1000.0;
    let mut prefill = config("p", KvRole::Prefill);
    prefill.k_d = 24 * 300;
    let (d, p) = (Node::start(decode).await.unwrap(), Node::start(prefill).await.unwrap());
    let agents = (0..12).map(|number| agent(&d, &p, number));
    let sums = futures_util::future::join_all(agents).await;
    let (finished, left) = sums.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    assert!(finished > 40 && left > 20, "{finished} finished, {left} left");
    at_rest(&d).await;
    at_rest(&p).await;
}
