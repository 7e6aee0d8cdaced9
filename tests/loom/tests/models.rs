//! Runs the models.

use inflight_loom::models;

#[test]
fn no_wake_up_of_a_response_is_lost_and_no_token_is_delivered_twice() {
    models::responses();
}

#[test]
fn the_watchdog_raises_no_false_alarm_and_misses_no_hang() {
    models::watchdog();
}

#[test]
fn the_thread_pool_runs_every_unit_once_and_sleeps_only_without_work() {
    models::thread_pool();
}

#[test]
fn callers_of_one_thread_pool_do_not_disturb_each_other() {
    models::concurrent_callers();
}
