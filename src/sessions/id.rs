//! What counts as an id: everything else falls through to the next source.

use std::borrow::Cow;

use crate::prompt::member;

/// The longest id taken.
const MAX_LEN: usize = 256;

/// The id in `raw`, trimmed; `None` for blank, over-long, non-ASCII and placeholder values.
pub(super) fn valid(raw: &str) -> Option<&str> {
    let id = raw.trim();
    let printable = id.bytes().all(|b| matches!(b, 0x20..=0x7E));
    let placeholder = ["null", "undefined", "default"].iter().any(|word| id.eq_ignore_ascii_case(word));
    // Also the zero uuid without its dashes.
    let zero = id.bytes().all(|b| matches!(b, b'0' | b'-')) && id.len() >= 32;
    (!id.is_empty() && id.len() <= MAX_LEN && printable && !placeholder && !zero).then_some(id)
}

/// As [`valid`], keeping the borrow where it can.
pub(super) fn valid_cow<'a>(raw: &Cow<'a, str>) -> Option<Cow<'a, str>> {
    match raw {
        Cow::Borrowed(raw) => valid(raw).map(Cow::Borrowed),
        Cow::Owned(raw) => valid(raw).map(|id| Cow::Owned(id.to_owned())),
    }
}

/// The session in Claude's `user_id`: a JSON string with `session_id`, or `user_<hex>_account_<…>_session_<uuid>`.
/// Any other user id names a person, not a conversation.
pub(super) fn of_user(user: &str) -> Option<Cow<'_, str>> {
    let user = user.trim();
    if user.starts_with('{') {
        return valid_cow(&member(user.as_bytes(), "session_id")?).map(|id| Cow::Owned(id.into_owned()));
    }
    let (hex, rest) = user.strip_prefix("user_")?.split_once("_account_")?;
    let (_, session) = rest.rsplit_once("_session_")?;
    if hex.is_empty() || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    valid(session).map(Cow::Borrowed)
}

/// SGLang's `rid` without the `_tN`/`_rN` of its turn and retry.
pub(super) fn of_rid(rid: &str) -> Option<&str> {
    let mut rid = valid(rid)?;
    while let Some((base, suffix)) = rid.rsplit_once('_') {
        let number = suffix.strip_prefix(['t', 'r']).unwrap_or_default();
        if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
            break;
        }
        rid = base;
    }
    valid(rid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_ids_are_none() {
        let long = "x".repeat(257);
        for bad in [
            "",
            "   ",
            "null",
            "Undefined",
            "default",
            "00000000-0000-0000-0000-000000000000",
            "sesé",
            "a\nb",
            &long,
        ] {
            assert_eq!(valid(bad), None, "{bad:?}");
        }
        assert_eq!(valid("  session-1 "), Some("session-1"));
        assert_eq!(valid("0"), Some("0"));
        assert_eq!(valid(&long[1..]), Some(&long[1..]));
    }

    #[test]
    fn user_ids() {
        let uuid = "0f2e7a54-1111-4222-8333-abcdefabcdef";
        assert_eq!(of_user(&format!("user_ab12_account__session_{uuid}")).as_deref(), Some(uuid));
        assert_eq!(of_user(&format!("user_ab12_account_x_session_{uuid}")).as_deref(), Some(uuid));
        assert_eq!(
            of_user(&format!("{{\"device_id\":\"d\",\"session_id\":\"{uuid}\"}}")).as_deref(),
            Some(uuid)
        );
        for bad in [
            "alice",
            "user_zzz_session_",
            "{\"session_id\":",
            "{\"session_id\":7}",
            "user_ab_account__session_",
        ] {
            assert_eq!(of_user(bad), None, "{bad}");
        }
    }

    #[test]
    fn rids() {
        assert_eq!(of_rid("abc_t12"), Some("abc"));
        assert_eq!(of_rid("abc_t1_r2"), Some("abc"));
        assert_eq!(of_rid("abc_tx"), Some("abc_tx"));
        assert_eq!(of_rid("_t1"), None);
    }
}
