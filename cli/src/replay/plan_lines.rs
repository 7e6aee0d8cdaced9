//! Text of `inflight replay --plans`: which sequences joined, ran and left at each plan of a worker.

use std::fmt::Write as _;

use inflight_worker::Preemption;

use super::batch::{Admitted, Changes, Joined, Number, Victim, Work};

/// Column at which the names of the changes begin: below the plan's number.
const INDENT: usize = 16;
/// Width of the names of the changes.
const NAME_WIDTH: usize = 10;

/// Returns one line for each kind of change of a plan, indented below the plan's own line.
pub fn changes(changes: &Changes) -> String {
    let mut text = String::new();
    let mut line = |name: &str, entries: Vec<String>, separator: &str| {
        if !entries.is_empty() {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{:INDENT$}{name:NAME_WIDTH$} {}", "", entries.join(separator));
        }
    };
    let joined = |joined: &Joined| {
        let Joined { number, tenant, known_tokens, max_tokens } = joined;
        format!("s{number} (tenant {tenant:?}, {known_tokens} tokens, at most {max_tokens} more)")
    };
    line("joined", changes.joined.iter().map(joined).collect(), ", ");
    line("ended", ended(&changes.ended), ", ");
    line("preempted", changes.preempted.iter().map(victim).collect(), ", ");
    let marked = |(victim, beneficiary): &(Number, Number)| format!("s{victim} for s{beneficiary}");
    line("marked", changes.marked.iter().map(marked).collect(), ", ");
    let at = |admitted: &Admitted| {
        let work = changes.work.iter().find(|work| work.number == admitted.number);
        let computes = work.map_or_else(|| ", no tokens yet".to_owned(), |work| format!(", {}", range(work)));
        let how = match admitted.after {
            None => "",
            Some(Preemption::Recompute) => ", computed again",
            Some(Preemption::Swap) => ", swapped in",
        };
        format!("s{} (slot {}{how}{computes})", admitted.number, admitted.slot)
    };
    let (fresh, again): (Vec<&Admitted>, Vec<&Admitted>) =
        changes.admitted.iter().partition(|admitted| admitted.after.is_none());
    line("admitted", fresh.into_iter().map(at).collect(), ", ");
    line("resumed", again.into_iter().map(at).collect(), ", ");
    let continues = |work: &&Work| changes.admitted.iter().all(|admitted| admitted.number != work.number);
    let (prefills, decodes): (Vec<&Work>, Vec<&Work>) =
        changes.work.iter().filter(continues).partition(|work| work.prefill);
    let mut continued = numbers(decodes.into_iter().map(|work| work.number).collect());
    continued.extend(prefills.into_iter().map(|work| format!("s{} ({})", work.number, range(work))));
    line("continued", continued, " ");
    let newly = |number: &Number| changes.admitted.iter().any(|admitted| admitted.number == *number);
    let held = changes.held.iter().map(|(_, number)| *number).filter(|number| !newly(number)).collect();
    line("held", numbers(held), " ");
    text
}

/// Returns a line with the sequences that ended after the last plan; empty if there are none.
pub fn rest(after_last: &[(Number, &'static str)]) -> String {
    if after_last.is_empty() {
        return String::new();
    }
    format!("{:INDENT$}{:NAME_WIDTH$} {}\n", "", "ended", ended(after_last).join(", "))
}

fn ended(ended: &[(Number, &'static str)]) -> Vec<String> {
    ended.iter().map(|(number, reason)| format!("s{number} ({reason})")).collect()
}

fn victim(victim: &Victim) -> String {
    let Victim { number, kind, beneficiary, .. } = victim;
    let how = match kind {
        Preemption::Recompute => "recompute",
        Preemption::Swap => "swap",
    };
    // 0: the beneficiary has ended.
    match *beneficiary {
        0 => format!("s{number} ({how})"),
        other if other == *number => format!("s{number} ({how}, for lack of its own blocks)"),
        other => format!("s{number} ({how}, for s{other})"),
    }
}

/// Describes the tokens of a prefill, or of a decode with drafts.
fn range(work: &Work) -> String {
    let last = (work.start + work.tokens).saturating_sub(1);
    match (work.prefill, work.drafts) {
        (false, 0) => format!("token {}", work.start),
        (false, drafts) => format!("token {} and {drafts} drafts", work.start),
        (true, _) => format!("tokens {}-{last}", work.start),
    }
}

/// Writes numbers as a list with ranges, such as `s1-s4 s7`.
fn numbers(mut numbers: Vec<Number>) -> Vec<String> {
    numbers.sort_unstable();
    let mut ranges: Vec<(Number, Number)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let write = |(first, last): (Number, Number)| match last - first {
        0 => format!("s{first}"),
        1 => format!("s{first} s{last}"),
        _ => format!("s{first}-s{last}"),
    };
    ranges.into_iter().map(write).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(number: Number, slot: u32, start: u32, tokens: u32, prefill: bool) -> Work {
        Work { number, slot, start, tokens, drafts: 0, prefill }
    }

    #[test]
    fn a_plan_names_who_joined_ran_and_left() {
        let joined = Joined { number: 9, tenant: "a\u{1b}[2J".to_owned(), known_tokens: 100, max_tokens: 20 };
        let plan = Changes {
            iteration: Some(7),
            joined: vec![joined],
            ended: vec![(1, "length"), (2, "cancelled")],
            preempted: vec![
                Victim { number: 3, slot: Some(0), kind: Preemption::Swap, beneficiary: 4 },
                Victim { number: 8, slot: Some(2), kind: Preemption::Recompute, beneficiary: 8 },
            ],
            admitted: vec![
                Admitted { number: 9, slot: 0, after: None },
                Admitted { number: 5, slot: 3, after: Some(Preemption::Swap) },
            ],
            marked: vec![(6, 4)],
            work: vec![
                work(4, 1, 31, 1, false),
                work(6, 4, 8, 1, false),
                Work { drafts: 2, ..work(10, 5, 7, 3, false) },
                work(11, 6, 7, 1, false),
                work(12, 7, 7, 1, false),
                work(9, 0, 0, 64, true),
                work(7, 8, 16, 16, true),
            ],
            held: vec![(3, 5), (9, 13)],
            ..Changes::default()
        };
        let expected = "                \
                joined     s9 (tenant \"a\\u{1b}[2J\", 100 tokens, at most 20 more)
                ended      s1 (length), s2 (cancelled)
                preempted  s3 (swap, for s4), s8 (recompute, for lack of its own blocks)
                marked     s6 for s4
                admitted   s9 (slot 0, tokens 0-63)
                resumed    s5 (slot 3, swapped in, no tokens yet)
                continued  s4 s6 s10-s12 s7 (tokens 16-31)
                held       s13
";
        assert_eq!(changes(&plan), expected);
        assert_eq!(changes(&Changes::default()), "");
        assert_eq!(rest(&[(4, "stop")]), "                ended      s4 (stop)\n");
    }
}
