//! The recorded cases of real clients: each request on the lane it belongs to.

use kvc_router::sessions::identify::run;

const VECTORS: &str = include_str!("data/identity-vectors.json");

#[test]
fn recorded_clients() {
    let (report, good) = run(VECTORS).expect("vectors");
    assert!(good, "{report}");
}
