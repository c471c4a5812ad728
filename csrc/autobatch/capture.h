// Capture: the boxed fallback that turns ops into nodes.
#pragma once

namespace autobatch {

// Registers the fallback on compat::kDeferKey, once a process (a second one would abort it).
void register_capture();

}  // namespace autobatch
