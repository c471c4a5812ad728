// Functions that the host (the program that embeds the library) provides: the line of the user's
// code, interruptions, and the interpreter's lock. Without hooks there is no line, nothing
// interrupts, and nothing is locked.
#pragma once

#include "autobatch/export.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

namespace autobatch {

// The place in the user's code that is running, as the host reports it.
struct Place {
  std::string site;       // the line, "model.py:12"; empty without one
  uint64_t position = 0;  // position within the line, as the host encodes it; 0: unknown
};
AUTOBATCH_INTERNAL void set_place_provider(std::function<Place()> provider);
Place current_place();
AUTOBATCH_INTERNAL std::string current_site();
// Sets the function that describes the stack around current_site(), as text in the host's format.
AUTOBATCH_INTERNAL void set_caller_provider(std::function<std::string()> provider);
std::string current_caller();
// While a guard lives, current_site() returns `site`, unless `site` is empty.
class SiteGuard {
 public:
  explicit SiteGuard(std::string site);
  ~SiteGuard();
  SiteGuard(const SiteGuard&) = delete;
  SiteGuard& operator=(const SiteGuard&) = delete;

 private:
  std::string before_;
};

// What the host knows about its language.
struct HostHooks {
  // Whether the error must end the flush at once (Ctrl-C). After other errors the batch is tried
  // again with fewer members.
  std::function<bool(const std::exception&)> interrupts;
  // Adds a line to the error that the user will see.
  std::function<void(const std::exception&, const std::string&)> annotate;
  // Runs a function that may wait for another thread, without the interpreter's lock.
  std::function<void(const std::function<void()>&)> wait;
  // Holds the interpreter's lock until the returned object is destroyed, so that meanwhile no
  // tensor is destroyed on another thread of the interpreter.
  std::function<std::shared_ptr<void>()> hold;
  // Whether the modules that Meta kernels in the interpreter's language import are already
  // imported. (In Python, importing torch._dynamo takes a second or more.)
  std::function<bool()> may_ask_meta;
};
AUTOBATCH_INTERNAL void set_host_hooks(HostHooks hooks);
AUTOBATCH_INTERNAL bool host_interrupts(const std::exception& error);
AUTOBATCH_INTERNAL void host_wait(const std::function<void()>& wait);
std::shared_ptr<void> host_hold();
bool host_may_ask_meta();
void host_annotate(const std::exception& error, const std::string& note);

}  // namespace autobatch
