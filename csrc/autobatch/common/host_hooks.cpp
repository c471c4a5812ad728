#include "autobatch/common/host_hooks.h"

#include <utility>

namespace autobatch {
namespace {

thread_local std::string site_of_flush;

HostHooks& host_hooks() {
  static auto* hooks = new HostHooks();
  return *hooks;
}

}  // namespace

void set_host_hooks(HostHooks hooks) { host_hooks() = std::move(hooks); }

bool host_interrupts(const std::exception& error) {
  return host_hooks().interrupts && host_hooks().interrupts(error);
}

void host_wait(const std::function<void()>& wait) {
  host_hooks().wait ? host_hooks().wait(wait) : wait();
}

std::shared_ptr<void> host_hold() { return host_hooks().hold ? host_hooks().hold() : nullptr; }

bool host_may_catch() { return host_hooks().may_catch && host_hooks().may_catch(); }
bool host_may_ask_meta() { return !host_hooks().may_ask_meta || host_hooks().may_ask_meta(); }

void host_annotate(const std::exception& error, const std::string& note) {
  if (host_hooks().annotate) host_hooks().annotate(error, note);
}

Place current_place() {
  if (!site_of_flush.empty()) return {site_of_flush};
  return host_hooks().place ? host_hooks().place() : Place();
}

std::string current_site() { return current_place().site; }

std::string current_caller() { return host_hooks().caller ? host_hooks().caller() : std::string(); }

SiteGuard::SiteGuard(std::string site) : before_(std::exchange(site_of_flush, std::move(site))) {}

SiteGuard::~SiteGuard() { site_of_flush = std::move(before_); }

}  // namespace autobatch
