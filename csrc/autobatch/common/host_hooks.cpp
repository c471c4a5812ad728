#include "autobatch/common/host_hooks.h"

#include <utility>

namespace autobatch {
namespace {

thread_local std::string site_of_flush;

std::function<Place()>& place_provider() {
  static auto* provider = new std::function<Place()>();
  return *provider;
}

std::function<std::string()>& caller_provider() {
  static auto* provider = new std::function<std::string()>();
  return *provider;
}

HostHooks& host_hooks() {
  static auto* hooks = new HostHooks();
  return *hooks;
}

}  // namespace

void set_place_provider(std::function<Place()> provider) { place_provider() = std::move(provider); }

void set_caller_provider(std::function<std::string()> provider) {
  caller_provider() = std::move(provider);
}

std::string current_caller() { return caller_provider() ? caller_provider()() : std::string(); }

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
  return place_provider() ? place_provider()() : Place();
}

std::string current_site() { return current_place().site; }

SiteGuard::SiteGuard(std::string site) : before_(std::exchange(site_of_flush, std::move(site))) {}

SiteGuard::~SiteGuard() { site_of_flush = std::move(before_); }

}  // namespace autobatch
