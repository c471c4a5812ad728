// What the library asks of whoever embeds it: the line of the user's code, interruptions, and the
// interpreter's lock. Without hooks there is no line, nothing interrupts, and nothing is locked.
#pragma once

#include "autobatch/export.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

namespace autobatch {

// What of the user's code is running, from whoever embeds the library.
struct Place {
  std::string site;       // the line, "model.py:12"; empty without one
  uint64_t position = 0;  // what of the line, as whoever embeds the library counts; 0: not known
};
AUTOBATCH_INTERNAL void set_place_provider(std::function<Place()> provider);
Place current_place();
AUTOBATCH_INTERNAL std::string current_site();
// What stands around that line on the stack, as a text of whoever embeds the library.
AUTOBATCH_INTERNAL void set_caller_provider(std::function<std::string()> provider);
std::string current_caller();
// What current_site() says while it lives, unless that is empty.
class SiteGuard {
 public:
  explicit SiteGuard(std::string site);
  ~SiteGuard();
  SiteGuard(const SiteGuard&) = delete;
  SiteGuard& operator=(const SiteGuard&) = delete;

 private:
  std::string before_;
};

// What whoever embeds the library knows of its own language.
struct HostHooks {
  // Whether it must end the flush at once (Ctrl-C) rather than be tried on fewer members.
  std::function<bool(const std::exception&)> interrupts;
  // Adds a line to what the user will be shown.
  std::function<void(const std::exception&, const std::string&)> annotate;
  // Runs a function that may wait for another thread, without the interpreter's lock.
  std::function<void(const std::function<void()>&)> wait;
  // Holds the interpreter's lock until what it returns is gone: no tensor dies on another of the
  // interpreter's threads meanwhile.
  std::function<std::shared_ptr<void>()> hold;
  // Whether what Meta kernels in the interpreter's language import has been imported.
  std::function<bool()> may_ask_meta;
};
AUTOBATCH_INTERNAL void set_host_hooks(HostHooks hooks);
AUTOBATCH_INTERNAL bool host_interrupts(const std::exception& error);
AUTOBATCH_INTERNAL void host_wait(const std::function<void()>& wait);
std::shared_ptr<void> host_hold();
bool host_may_ask_meta();
void host_annotate(const std::exception& error, const std::string& note);

}  // namespace autobatch
