//! Changes of a body's own members. Each of the others keeps its bytes, whatever it holds.

use super::error::BadBody;
use super::json::Cursor;

/// The object `body` with the members `set` (name and JSON text) at its head, and without any other member of those
/// names or of the names in `drop`. White space between members goes.
///
/// # Errors
/// [`BadBody`]: not a JSON object.
pub fn rewrite(body: &[u8], set: &[(&str, &str)], drop: &[&str]) -> Result<Vec<u8>, BadBody> {
    let more: usize = set.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
    let mut out = Vec::with_capacity(body.len() + more);
    out.push(b'{');
    for (name, value) in set {
        comma(&mut out);
        for part in ["\"", name, "\":", value] {
            out.extend_from_slice(part.as_bytes());
        }
    }
    let (mut cursor, mut first) = (Cursor::new(body), true);
    cursor.object()?;
    loop {
        let start = match cursor.peek() {
            Some(b',') => cursor.at() + 1,
            _ => cursor.at(),
        };
        let Some(name) = cursor.key(&mut first)? else { break };
        let named = |other: &&str| name.as_ref() == other.as_bytes();
        let goes = drop.iter().any(named) || set.iter().any(|(other, _)| named(other));
        cursor.skip()?;
        if !goes {
            comma(&mut out);
            out.extend_from_slice(cursor.since(start).trim_ascii_start());
        }
    }
    cursor.end()?;
    out.push(b'}');
    Ok(out)
}

/// The JSON texts of some members of the object `body`; of one that stands there twice, the last counts. What is no
/// object has none.
pub fn members<'a, const N: usize>(body: &'a [u8], names: [&str; N]) -> [Option<&'a [u8]>; N] {
    let mut found = [None; N];
    let mut read = || -> Result<(), BadBody> {
        let (mut cursor, mut first) = (Cursor::new(body), true);
        cursor.object()?;
        while let Some(name) = cursor.key(&mut first)? {
            let text = cursor.skip()?;
            if let Some(place) = names.iter().position(|other| name.as_ref() == other.as_bytes()) {
                found[place] = Some(text);
            }
        }
        Ok(())
    };
    match read() {
        Ok(()) => found,
        Err(_) => [None; N],
    }
}

fn comma(out: &mut Vec<u8>) {
    if out.len() > 1 {
        out.push(b',');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(body: &str, set: &[(&str, &str)], drop: &[&str]) -> String {
        String::from_utf8(rewrite(body.as_bytes(), set, drop).unwrap()).unwrap()
    }

    #[test]
    fn only_the_named_members_change() {
        let body = r#" { "a" : 1e400 , "stream": true,"b":{"stream":[1, 2]}, "n":2 } "#;
        let out = text(body, &[("stream", "false"), ("x", r#"{"y":null}"#)], &["n", "absent"]);
        assert_eq!(out, r#"{"stream":false,"x":{"y":null},"a" : 1e400,"b":{"stream":[1, 2]}}"#);
        assert_eq!(text("{}", &[], &[]), "{}");
        assert_eq!(text("{}", &[("x", "1")], &[]), r#"{"x":1}"#);
        assert_eq!(text(r#"{"a":1,"a":2}"#, &[], &["a"]), "{}");
    }

    /// A client cannot bring a member back by writing its name another way.
    #[test]
    fn an_escaped_name_is_the_same_name() {
        assert_eq!(text(r#"{"\u006e":3,"a":"n"}"#, &[("n", "1")], &[]), r#"{"n":1,"a":"n"}"#);
    }

    #[test]
    fn members_are_read_as_they_stand() {
        let body = br#"{"n":1, "a":{"n":3}, "n" : [2] }"#;
        assert_eq!(members(body, ["n", "a", "x"]), [Some(&b"[2]"[..]), Some(&br#"{"n":3}"#[..]), None]);
        assert_eq!(members(br#"{"n":1"#, ["n"]), [None]);
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for body in ["", "[]", "{", r#"{"a":1,}"#, r#"{"a":1}{}"#, r#"{"a"1}"#] {
            assert!(rewrite(body.as_bytes(), &[("x", "1")], &[]).is_err(), "{body}");
        }
    }
}
