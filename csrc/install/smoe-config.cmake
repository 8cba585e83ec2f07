# find_package(smoe) gives the target smoe::smoe: header, library and run path.
get_filename_component(_smoe_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET smoe::smoe)
  add_library(smoe::smoe SHARED IMPORTED)
  set_target_properties(smoe::smoe PROPERTIES
    IMPORTED_LOCATION "${_smoe_prefix}/lib/libsmoe${CMAKE_SHARED_LIBRARY_SUFFIX}"
    INTERFACE_INCLUDE_DIRECTORIES "${_smoe_prefix}/include")
endif()
unset(_smoe_prefix)
